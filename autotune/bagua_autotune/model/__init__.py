"""The domain: knobs, configurations, buckets, jobs, trials and their statistics. No I/O."""
