"""The HTTP APIs: what comes in is checked here, what goes out is put into words here."""
