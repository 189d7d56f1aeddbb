"""`with run.build():`: construction that is recorded instead of done, and done again one tensor at a time."""
