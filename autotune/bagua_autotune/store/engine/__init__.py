"""The database: which one it is, how it is opened, its tables, and the schema of each release."""
