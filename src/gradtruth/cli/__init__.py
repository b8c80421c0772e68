"""The command ``gradtruth``. ``main`` starts it; everything else here needs the extra ``tool``."""
