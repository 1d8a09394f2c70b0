"""What leads from each version of the schema to the next, as Alembic runs it.

Version 1 has none: a new database gets the tables of today at once. A change of a table raises
``tables.SCHEMA_VERSION`` and adds a file here, named after the new version (``2.py``)::

    from alembic import op
    from sqlalchemy import Column, Text

    revision, down_revision = "2", None  # of 3.py: "3", "2"


    def upgrade() -> None:
        op.add_column("jobs", Column("colour", Text, nullable=False, server_default=""))

A new column has a default on the server or may be NULL, as replicas of the release before go on
writing rows meanwhile.
"""
