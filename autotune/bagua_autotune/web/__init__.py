"""The service's own page: static HTML, CSS and ES modules, as they are sent. No code of Python."""
