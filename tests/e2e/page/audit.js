() => {
  const found = [];
  const name = (node) => `${node.tagName.toLowerCase()}#${node.id}.${node.className} ${node.textContent.trim().slice(0, 40)}`;
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((channels(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const isSeen = (node) => node.checkVisibility() && !node.closest(".unseen") && node.getClientRects().length > 0;

  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const node of document.body.querySelectorAll("*")) {
    const isText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!isText || !isSeen(node) || node.closest("pre")) continue;
    const box = node.getBoundingClientRect();
    if (box.right > width + 0.5 || box.left < -0.5) found.push(`beyond the edge: ${name(node)}`);
    const [light, dark] = [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) found.push(`contrast ${contrast.toFixed(2)}: ${name(node)}`);
  }
  // Nothing lies on anything else: of the leaves that hold text no two share an area.
  const leaves = [...document.body.querySelectorAll("*")]
    .filter((node) => node.children.length === 0 && node.textContent.trim() && isSeen(node) && !node.closest("pre, .events, svg, select"))
    .map((node) => ({ node, box: node.getBoundingClientRect() }));
  leaves.forEach((a, index) => {
    for (const b of leaves.slice(index + 1)) {
      const across = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const down = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
      if (across > 1 && down > 1 && getComputedStyle(a.node).display !== "inline" && getComputedStyle(b.node).display !== "inline") {
        found.push(`${name(a.node)} lies on ${name(b.node)}`);
      }
    }
  });
  for (const node of document.querySelectorAll("button, input, select, a, [role=img], [tabindex]")) {
    if (isSeen(node) && !(node.getAttribute("aria-label") || node.labels?.length || node.getAttribute("aria-labelledby") || node.textContent.trim())) found.push(`no name: ${name(node)}`);
  }
  // Parts that a screen reader lists have names that tell them apart.
  const landmarks = [...document.querySelectorAll("main, section[aria-labelledby], [role=region]")].filter(isSeen);
  const names = landmarks.map((node) => document.getElementById(node.getAttribute("aria-labelledby"))?.textContent ?? "");
  names.forEach((text, index) => {
    if (names.indexOf(text) !== index) found.push(`two landmarks are named ${text}`);
  });
  return found;
}
