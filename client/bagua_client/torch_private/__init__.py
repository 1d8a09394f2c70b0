"""All private names of torch that the client uses, each with the reason why no public name will do.

When torch changes them, only this folder has to change. ``tests/client/test_torch_private.py``
fails when one of the names is removed or means something else.
"""
