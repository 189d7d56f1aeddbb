"""What a person sees of a run: lines, progress, summary."""
