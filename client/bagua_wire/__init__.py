"""The words that client, service and simulator share, each said once: the knobs and how they read,
configurations, the rule that cuts buckets, profiled steps, and what a tuning may take. Needs the
standard library only.
"""
