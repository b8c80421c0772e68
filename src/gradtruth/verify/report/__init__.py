"""Reports: the rows of a verification for a terminal, a pipe, a program or a reader.

Only ``console`` and ``html`` need the packages of the extra ``tool``, and import them when they are used.
"""
