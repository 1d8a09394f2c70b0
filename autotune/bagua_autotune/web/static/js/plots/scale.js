// Ranges of the vertical axes.

const MARGIN = 0.08;

/** From the least to the greatest with a margin; never empty. */
export function padded(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const margin = (high - low || Math.abs(high) || 1) * MARGIN;
  return [low - margin, high + margin];
}

/**
 * As `padded`, but a few steps that took far longer do not press all others together: beyond the
 * top is what is above the 90th percentile by more than that is above the median.
 */
export function withoutStragglers(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  const top = at(0.9) + Math.max(at(0.9) - at(0.5), at(0.5) * 0.02);
  return padded(sorted.filter((value) => value <= top));
}
