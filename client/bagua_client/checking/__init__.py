"""The ranks' part of ``bagua-autotune check``: what it measures and sees where nothing is tuned."""
