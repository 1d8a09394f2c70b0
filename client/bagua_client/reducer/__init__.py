"""The reducer: torch's own, cut anew while the job runs, its buckets carried in chosen ways."""
