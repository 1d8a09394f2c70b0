"""The HTTP APIs: requests are checked here, and answers are written here."""
