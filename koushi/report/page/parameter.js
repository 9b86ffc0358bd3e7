// One parameter as a block, cut by tensor parallel and then by fully sharded data parallel.
function bounds(size, pieces, index) {
  const rows = Math.ceil(size / pieces);
  return [Math.min(index * rows, size), Math.min((index + 1) * rows, size)];
}

// The part of a parameter at an index of tp and of dp_shard: [start, stop] of every dim.
function slice(layout, parameter, tp, shard) {
  const spans = parameter.shape.map((size) => [0, size]);
  const cut = (axis, pieces, index) => {
    const [start, stop] = spans[axis], [first, last] = bounds(stop - start, pieces, index);
    spans[axis] = [start + first, start + last];
  };
  const axis = parameter.tp[degree(layout, ["tp"])];
  if (axis !== null) cut(axis, degree(layout, ["tp"]), tp);
  cut(0, degree(layout, ["dp_shard"]), shard);
  return spans;
}

function showBlock(place, layout, parameter) {
  const here = coordinate(layout, state.rank), at = (dim) => here[DATA.dims.indexOf(dim)];
  const tp = degree(layout, ["tp"]), shards = degree(layout, ["dp_shard"]), axis = parameter.tp[tp];
  const [rows, columns] = [parameter.shape[0], parameter.shape[1] ?? 1];
  const width = 440, height = parameter.shape.length === 1 ? 220 : Math.max(120, Math.min(420, width * rows / columns));
  const svg = draw("svg", { viewBox: `-4 -4 ${width + 8} ${height + 8}`, role: "img" });
  const box = (spans) => ({ x: width * (spans[1] ?? [0, 1])[0] / columns, y: height * spans[0][0] / rows,
    width: width * ((spans[1] ?? [0, 1])[1] - (spans[1] ?? [0, 1])[0]) / columns, height: height * (spans[0][1] - spans[0][0]) / rows });
  const defs = draw("defs", {}, svg), hatch = draw("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse" }, defs);
  draw("path", { d: "M0 7 7 0", stroke: "var(--soft)", "stroke-width": 1 }, hatch);
  draw("rect", { width, height, fill: "url(#hatch)", stroke: "var(--line)" }, svg);
  const event = parameter.events.filter((each) => each.dims.every((dim) => degree(layout, [dim]) > 1))[state.event];
  const spread = event?.lights ?? "piece";
  const indices = (count, index, all) => all ? Array.from({ length: count }, (_, each) => each) : [index];
  for (const t of indices(axis === null ? 1 : tp, axis === null ? 0 : at("tp"), spread === "whole"))
    for (const s of indices(shards, at("dp_shard"), spread !== "piece"))
      draw("rect", { ...box(slice(layout, parameter, t, s)), class: "slice", fill: event?.colour ? `var(--${event.colour})` : "var(--state)", opacity: t === at("tp") || axis === null ? .95 : .5 }, svg);
  const lines = (count, at_, strokeWidth) => { if (count * tp <= 96) for (let i = 1; i < count; i++) draw("path", { d: at_(i), stroke: "var(--ink)", "stroke-width": strokeWidth, fill: "none" }, svg); };
  const pieceOf = (t) => box(slice({ ...layout, shape: layout.shape.map((size, dim) => DATA.dims[dim] === "dp_shard" ? 1 : size) }, parameter, t, 0));
  for (let t = 0; t < (axis === null ? 1 : tp); t++) {
    const piece = pieceOf(t);
    lines(shards, (i) => `M${piece.x} ${piece.y + piece.height * i / shards}h${piece.width}`, .4);
    draw("rect", { x: piece.x, y: piece.y, width: piece.width, height: piece.height, fill: "none", stroke: "var(--ink)", "stroke-width": 1.6 }, svg);
  }
  const spans = slice(layout, parameter, at("tp"), at("dp_shard"));
  const filled = spans.every(([start, stop]) => stop > start);
  const text = filled ? `[${spans.map(([start, stop]) => `${start}:${stop}`).join(", ")}]` : word("empty");
  const copies = degree(layout, axis === null ? ["dp_replicate", "tp"] : ["dp_replicate"]);
  svg.setAttribute("aria-label", word("piece", { rank: state.rank, slice: text }));
  place.replaceChildren(svg, element("p", {}, word("whole", { shape: `[${parameter.shape.join(", ")}]` })),
    element("p", { id: "piece" }, word("piece", { rank: state.rank, slice: text })), element("p", {}, word("copies", { copies })));
}

function showEvents(list, scrubber, layout, parameter) {
  const events = parameter.events.filter((each) => each.dims.every((dim) => degree(layout, [dim]) > 1));
  scrubber.max = Math.max(0, events.length - 1);
  state.event = Math.min(state.event, events.length - 1);
  scrubber.value = state.event;
  list.replaceChildren(...events.map((event, index) => {
    const item = element("li", {}, `${word(event.phase)}: ${event.text[language]}`);
    if (index === state.event) { item.setAttribute("aria-current", "step"); item.style.setProperty("--now", event.colour ? `var(--${event.colour})` : "var(--ink)"); }
    return item;
  }));
  scrubber.setAttribute("aria-valuetext", list.children[state.event]?.textContent ?? "");
}
