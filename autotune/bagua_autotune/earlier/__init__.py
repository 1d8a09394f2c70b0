"""What earlier jobs, and earlier lives of one training, leave to a new job."""
