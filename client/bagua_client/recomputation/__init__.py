"""The blocks of a model that the training has made recompute their activations, on one rank: how
many of them keep what they computed instead, as far as the memory goes."""
