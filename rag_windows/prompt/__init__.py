"""Messages and passages become token ids here, and nowhere else."""
