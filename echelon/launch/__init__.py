"""Starting the processes of a run, watching them, and leaving nothing behind."""
