// One plot: uPlot for scales, axes and lines; points can be read by pointer and by key. Its colours
// are read from the style sheet, so that light and dark are decided in one place.

import { element, setText } from "../dom.js";

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

const REACH_PX = 40;
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };

/**
 * `options(colours)` gives uPlot's options but the size; `show` the data, the points that can be
 * read ({ x, y, text }, by x), and the main fact for those who do not see the plot.
 */
export class Plot {
  constructor(parent, options) {
    this.parent = parent;
    this.options = options;
    this.points = [];
    this.chosen = null;
    this.canvas = element("div", { class: "canvas", role: "img", tabindex: "0" });
    this.ring = element("div", { class: "ring", hidden: "" });
    this.tip = element("div", { class: "tip", "aria-live": "polite", hidden: "" });
    // What a screen reader shall hear must not be inside of an image.
    parent.replaceChildren(this.canvas, this.tip);
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#choose(null));
    this.canvas.addEventListener("pointerleave", () => this.#choose(null));
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    new ResizeObserver(() => this.#resize()).observe(parent);
    onThemeChange(() => this.#make());
  }

  /** The options are asked for again at the next show. */
  renew() {
    this.uplot?.destroy();
    this.uplot = null;
  }

  show(data, points, label) {
    const isSame = this.uplot && this.data.length === data.length;
    this.data = data;
    this.points = points;
    this.canvas.setAttribute("aria-label", `${label} Arrow keys read the points.`);
    if (isSame) this.uplot.setData(data);
    else this.#make();
    if (this.chosen !== null) this.#choose(Math.min(this.chosen, points.length - 1));
  }

  #make() {
    if (!this.data || !this.parent.clientWidth) return;
    this.uplot?.destroy();
    const options = {
      ...this.#size(),
      legend: { show: false },
      cursor: { show: false },
      padding: [10, 12, 0, 0],
      ...this.options(colours()),
    };
    this.uplot = new uPlot(options, this.data, this.canvas);
    this.uplot.over.append(this.ring);
  }

  #size() {
    return { width: this.parent.clientWidth, height: this.parent.clientHeight };
  }

  #resize() {
    if (!this.uplot) this.#make();
    else this.uplot.setSize(this.#size());
    if (this.chosen !== null) this.#choose(this.chosen);
  }

  #key(event) {
    const step = STEPS[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (step === undefined || this.points.length === 0) return;
    event.preventDefault();
    const last = this.points.length - 1;
    const from = this.chosen ?? (step < 0 ? last + 1 : -1);
    this.#choose(Math.max(0, Math.min(last, from + step)));
  }

  #point(event) {
    if (!this.uplot) return;
    const box = this.uplot.over.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let nearest = null;
    let least = REACH_PX ** 2;
    this.points.forEach((point, index) => {
      const [px, py] = this.#place(point);
      const distance = (px - x) ** 2 + (this.readsColumns ? 0 : (py - y) ** 2);
      if (distance < least) [nearest, least] = [index, distance];
    });
    this.#choose(nearest);
  }

  #place({ x, y }) {
    const limited = Math.max(this.uplot.scales.y.min, Math.min(this.uplot.scales.y.max, y));
    return [this.uplot.valToPos(x, "x"), this.uplot.valToPos(limited, "y")];
  }

  #choose(index) {
    const point = index === null || index < 0 ? null : this.points[index];
    this.chosen = point ? index : null;
    this.ring.hidden = this.tip.hidden = !point;
    if (!point || !this.uplot) return;
    const [x, y] = this.#place(point);
    this.ring.style.translate = `${x}px ${y}px`;
    setText(this.tip, point.text);
    // Beside the point, on the side where there is room.
    const { clientWidth: width, clientHeight: height } = this.uplot.over;
    const isRight = x < width / 2;
    const left = isRight ? Math.min(x + 12, width - this.tip.offsetWidth) : Math.max(0, x - 12 - this.tip.offsetWidth);
    const top = Math.max(0, Math.min(y - this.tip.offsetHeight - 10, height - this.tip.offsetHeight));
    const { offsetLeft, offsetTop } = this.uplot.over;
    this.tip.style.translate = `${offsetLeft + left}px ${offsetTop + top}px`;
  }
}
