"""Parts of a model that each rank has of its own."""
