// The plots' colours, read from the style sheet, so that light and dark are decided in one place.

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: read("muted"),
    grid: read("grid"),
    line: read("border"),
    accent: read("accent"),
    best: read("accent"),
    default: read("plot-default"),
    other: read("plot-other"),
    surface: read("surface"),
    ways: [read("way-0"), read("way-1"), read("way-2"), read("way-3")],
    font: `11px ${read("font")}`,
  };
}

/** Calls back when the reader goes from light to dark or back. */
export function onThemeChange(callback) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", callback);
}
