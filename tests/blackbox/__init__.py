"""What users see: public names and the command line alone, nothing of the inside."""
