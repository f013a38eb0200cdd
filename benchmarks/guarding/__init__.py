"""What the guard is worth: questions asked with windows, in one prompt, and guarded."""
