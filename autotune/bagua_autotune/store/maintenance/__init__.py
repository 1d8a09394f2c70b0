"""What keeps a database small and whole: deleting what is old, making copies, checking it."""
