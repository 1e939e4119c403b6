// What is wrong with the page as it is drawn: one line each. Tables are canvases; what a screen reader finds in
// them is looked at, their pixels are not.
() => {
  const problems = [];
  const boxOf = (e) => e.getBoundingClientRect();
  const words = (e) => (e.textContent || "").trim().slice(0, 40);
  const seen = (e) => {
    const box = boxOf(e), style = getComputedStyle(e);
    return box.width > 1 && box.height > 1 && e.checkVisibility() && style.visibility !== "hidden" && style.opacity !== "0"
      && !e.closest('[aria-hidden="true"],[disabled],[aria-disabled="true"],[data-testid=stHeaderActionElements]');
  };

  // Clipped: text that is wider than what shows it.
  const labels = '[data-testid^=stMetric] *, h1, h2, h3, button p, label p, [data-testid=stCaptionContainer] p, [data-testid=stBadge] *, [data-testid=stMarkdownBadge], [data-testid=stSidebarNav] span, [data-testid=stExpander] summary *, [role=tab] *, [data-testid=stAlert] *';
  for (const e of document.querySelectorAll(labels)) {
    const style = getComputedStyle(e);
    const hides = style.overflowX !== "visible" || style.textOverflow === "ellipsis";
    // What shows an ellipsis may hold its text in an element within.
    const holds = !e.children.length || style.textOverflow === "ellipsis";
    if (seen(e) && holds && hides && e.scrollWidth > e.clientWidth + 1)
      problems.push(`clipped: "${words(e)}" needs ${e.scrollWidth} px, has ${e.clientWidth}`);
  }
  for (const svg of document.querySelectorAll("[data-testid=stVegaLiteChart] svg")) {
    const frame = boxOf(svg);
    const texts = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim() && seen(t));
    for (const t of texts) {
      const box = boxOf(t);
      if (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2)
        problems.push(`clipped in a chart: "${words(t)}"`);
      if (t.textContent.endsWith("…")) problems.push(`cut off in a chart: "${words(t)}"`);
    }
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length; j++) {
        const a = boxOf(texts[i]), b = boxOf(texts[j]);
        const w = Math.min(a.right, b.right) - Math.max(a.left, b.left), h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (w > 1.5 && h > 3.5) problems.push(`overlap in a chart: "${words(texts[i])}" and "${words(texts[j])}"`);
      }
    // Every chart has marks, and every mark can be seen.
    const shapes = [...svg.querySelectorAll(".role-mark path, .role-mark rect, .role-mark line, .role-mark use")]
      .filter((e) => !e.closest(".role-legend, .role-axis, .background") && e.getAttribute("aria-hidden") !== "true");
    const about = words(svg.closest("[data-testid=stVegaLiteChart]")?.querySelector("[aria-label]") || svg);
    if (!shapes.length) problems.push(`a chart without a mark: "${about}"`);
    const lines = new Set();
    for (const e of shapes) {
      const box = e.getBoundingClientRect(), isLine = e.closest(".mark-line") !== null;
      const has = isLine ? box.width + box.height > 0 || shapes.length > 1 : box.width > 0 && box.height > 0;
      const kind = (e.parentElement.getAttribute("class") || e.tagName).split(" ")[0];
      if (!has && !lines.has(kind)) {
        lines.add(kind);
        problems.push(`a mark without a size: ${kind}, ${box.width.toFixed(3)} × ${box.height.toFixed(3)} px`);
      }
    }
    // Every axis has finite labels, each of them once; a logarithmic one no powers that nobody reads.
    for (const axis of svg.querySelectorAll("g.role-axis")) {
      const labels = [...axis.querySelectorAll(".role-axis-label text")].filter((t) => seen(t)).map((t) => t.textContent.trim()).filter(Boolean);
      const wrong = labels.filter((text) => /nan|infinity|undefined|null|\de[+-]\d/i.test(text));
      const title = axis.querySelector(".role-axis-title")?.textContent || "";
      if (title && !labels.length && !title.startsWith("Cells of")) problems.push(`an axis without labels: ${title}`);
      if (wrong.length) problems.push(`an axis with a label that is no number: ${wrong.slice(0, 3).join(", ")}`);
      const twice = labels.filter((text, i) => labels.indexOf(text) !== i);
      if (twice.length) problems.push(`an axis that repeats a label: ${[...new Set(twice)].slice(0, 3).join(", ")}`);
    }
    // A unit on each axis: Vega writes its title into the axis's description.
    for (const axis of svg.querySelectorAll("g.role-axis[aria-label]")) {
      const about = axis.getAttribute("aria-label");
      if (!/titled '/.test(about) && /waterfall|step/i.test(about) === false && !/discrete scale/.test(about))
        problems.push(`no unit on an axis: ${about.slice(0, 60)}`);
    }
  }

  // The gateway runs, so it answers.
  for (const e of document.querySelectorAll("[data-testid=stAlert]"))
    if (seen(e) && /does not answer/.test(e.textContent)) problems.push(`an answer did not come: ${words(e)}`);

  // Nothing is wider than the window, and the page has one heading and a title of its own.
  const main = document.querySelector("[data-testid=stMain]");
  if (main && main.scrollWidth > main.clientWidth + 1) problems.push(`wider than the window: ${main.scrollWidth} px of ${main.clientWidth}`);
  const titles = [...document.querySelectorAll("h1")].filter(seen);
  if (titles.length !== 1) problems.push(`${titles.length} main headings`);
  else if (!document.title.startsWith(words(titles[0]))) problems.push(`the window's title is "${document.title}"`);
  const icon = document.querySelector("link[rel~=icon]");
  if (!icon || !/\/media\/|mark/.test(icon.href)) problems.push("no favicon of its own");

  // A screen reader finds a table in each canvas, with its cells as text.
  for (const frame of document.querySelectorAll("[data-testid=stDataFrame]")) {
    if (!seen(frame)) continue;
    const table = frame.querySelector("canvas table[role=grid], canvas table");
    const cells = table ? [...table.querySelectorAll("td, [role=gridcell]")].filter((e) => e.textContent.trim()) : [];
    if (!cells.length) problems.push("a table without text for a screen reader");
  }

  // Contrast: the colour of text on the nearest opaque background behind it.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      const found = rgba(getComputedStyle(at).backgroundColor);
      if (found[3] > 0) layers.push(found);
      if (found[3] >= 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const reported = new Set();
  const leaves = [...document.querySelectorAll("p, span, h1, h2, h3, label, div, button, text, li, a, input, textarea, code")]
    .filter((e) => seen(e) && ([...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || /INPUT|TEXTAREA/.test(e.tagName)));
  for (const e of leaves) {
    if (e.closest("[data-testid=stIconMaterial]") || /Material/.test(getComputedStyle(e).fontFamily)) continue;
    const style = getComputedStyle(e), back = behind(e);
    const colour = over(rgba(e.tagName === "text" ? style.fill : style.color), back);
    const [hi, lo] = [light(colour), light(back)].sort((a, b) => b - a), ratio = (hi + 0.05) / (lo + 0.05);
    const line = `contrast ${ratio.toFixed(2)}: "${words(e) || e.tagName}"`;
    if (ratio < 4.5 && !reported.has(line)) { reported.add(line); problems.push(line); }
  }
  return problems;
}
