// Shapes of points, on a canvas and in a legend: each way to reduce keeps its colour and shape.

import { element, renew, svg } from "../dom.js";
import { knobValue, namedValues } from "../words.js";

export const SHAPES = ["circle", "square", "triangle", "diamond"];

// Corners in units of the radius; areas are about that of the circle.
const CORNERS = {
  square: [[-0.89, -0.89], [0.89, -0.89], [0.89, 0.89], [-0.89, 0.89]],
  triangle: [[0, -1.25], [1.15, 0.8], [-1.15, 0.8]],
  diamond: [[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]],
};

/** Draw one point; coordinates and radius are in the canvas' pixels. */
export function drawMark(context, shape, x, y, radius, { fill, stroke, width = 1 }) {
  context.beginPath();
  if (CORNERS[shape]) {
    CORNERS[shape].forEach(([dx, dy], index) => {
      context[index ? "lineTo" : "moveTo"](x + dx * radius, y + dy * radius);
    });
    context.closePath();
  } else {
    context.arc(x, y, radius, 0, 2 * Math.PI);
  }
  if (fill) {
    context.fillStyle = fill;
    context.fill();
  }
  if (stroke) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.stroke();
  }
}

/** Entries: { label, shape, className }; the class gives the colour. */
export function showLegend(list, entries) {
  renew(list, entries, () => entries.map(({ label, shape, className }) =>
    element("li", {}, svg("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true", class: className }, swatch(shape)), label),
  ));
}

function swatch(shape) {
  if (shape === "line") return svg("path", { d: "M-6 0H6", class: "stroke" });
  if (shape === "dashes") return svg("path", { d: "M-6 0H-2M2 0H6", class: "stroke" });
  if (shape === "rule") return svg("path", { d: "M0 -6V6", class: "stroke thin" });
  if (shape === "band") return svg("rect", { x: -6, y: -4, width: 12, height: 8, class: "band" });
  if (shape === "bar") return svg("rect", { x: -5, y: -5, width: 10, height: 10, rx: 1.5 });
  if (!CORNERS[shape]) return svg("circle", { r: 4 });
  return svg("polygon", { points: CORNERS[shape].map(([x, y]) => `${x * 4},${y * 4}`).join(" ") });
}

const KNOB = "hierarchical";

export function wayOf(configuration) {
  return String(configuration[KNOB] ?? "off");
}

/** The ways among these configurations: { name, label, shape, index }. */
export function waysOf(configurations) {
  const order = namedValues(KNOB);
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const names = [...new Set(configurations.map(wayOf))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  return names.map((name) => {
    const index = Math.min(rank(name), SHAPES.length - 1);
    // Settings of a command have nothing to do with ways to reduce.
    const label = configurations.some((each) => KNOB in each) ? knobValue(KNOB, name) : "runs";
    return { name, label, shape: SHAPES[index], index };
  });
}
