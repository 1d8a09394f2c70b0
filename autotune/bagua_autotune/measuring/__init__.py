"""How fast each configuration is: what was observed, and how sure that is."""
