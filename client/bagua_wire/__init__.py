"""The words that client and service share, each said once: the knobs, the rule that cuts buckets,
and what a tuning may take. Needs the standard library only.
"""
