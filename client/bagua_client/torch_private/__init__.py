"""All private names of torch that the client uses, each with the reason why nothing public does.

Where torch changes, this folder changes, and nothing else. ``tests/client/test_torch_private.py``
fails when one of the names goes or means something else.
"""
