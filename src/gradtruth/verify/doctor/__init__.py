"""The doctor: a fixed programme of problems and checks over every backend that is found."""
