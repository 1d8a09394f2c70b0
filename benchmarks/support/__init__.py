"""What the benchmarks are made of; none of it is a benchmark by itself."""
