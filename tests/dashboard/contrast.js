// Every visible piece of text whose contrast to what is behind it is less than 4.5:1 (WCAG 2.2, 1.4.3).
() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below, share) => below.map((value, i) => value * (1 - share) + top[i] * share);
  const opacity = (element) => {
    let found = 1;
    for (let e = element; e; e = e.parentElement) found *= parseFloat(getComputedStyle(e).opacity);
    return found;
  };
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const layer = rgba(getComputedStyle(e).backgroundColor);
      layers.push(layer);
      if (layer[3] > 0.99) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below, layer[3]), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => (v / 255 <= 0.03928 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (!text || box.width < 1 || box.height < 1 || style.visibility === "hidden") continue;
    if (element.closest("style, script, noscript")) continue;
    const svg = element.closest("svg");
    const behind = background(svg ? svg.parentElement : element);
    const colour = rgba(svg ? style.fill : style.color);
    const seen = over(colour, behind, colour[3] * opacity(element));
    const [a, b] = [light(seen), light(behind)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${text.slice(0, 60)}`);
  }
  return faint;
};
