"""What a cell showed.

``selection`` says what of it is measured twice; ``figures`` are what it showed, ``goals`` whether
that is enough; ``report`` prints its ``tables``.
"""
