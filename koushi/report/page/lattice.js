// The lattice: cells of ranks in boxes of nodes. What is lit follows from the mesh's degrees and strides.
const SVG = "http://www.w3.org/2000/svg";
const PATTERNS = { tp: "M0 6 6 0", pp: "M0 3H6", dp_shard: "M3 0V6", dp_replicate: "M0 0 6 6", cp: "M0 3H6M3 0V6", fold: "M0 6 6 0M0 0 6 6" };

const FAINTEST = .4;
const LOW = 420; // px of the board

// How strong a colour is at an index along a group of so many.
function strength(index, count) { return count > 1 ? FAINTEST + (1 - FAINTEST) * index / (count - 1) : 1; }

function draw(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function coordinate(layout, rank) {
  return layout.strides.map((stride, axis) => Math.floor(rank / stride) % layout.shape[axis]);
}

function group(layout, rank, dims) {
  const here = coordinate(layout, rank);
  let ranks = [rank];
  DATA.dims.forEach((dim, axis) => {
    if (!dims.includes(dim)) return;
    const stride = layout.strides[axis], base = here[axis] * stride;
    ranks = ranks.flatMap((member) => Array.from({ length: layout.shape[axis] }, (_, index) => member - base + index * stride));
  });
  return ranks.sort((a, b) => a - b);
}

function degree(layout, dims) {
  return DATA.dims.reduce((product, dim, axis) => product * (dims.includes(dim) ? layout.shape[axis] : 1), 1);
}

class Lattice {
  constructor(board, chosen) {
    this.board = board;
    this.chosen = chosen;
    this.cells = [];
    this.lit = [];
    new ResizeObserver(() => this.resize()).observe(board);
  }

  resize() {
    const width = Math.max(280, Math.floor(this.board.clientWidth));
    if (width !== this.width) { this.width = width; this.build(); }
  }

  build() {
    const world = DATA.world, perNode = DATA.nodeSize, nodes = Math.ceil(world / perNode);
    const least = world <= 256 ? (this.width < 500 ? 16 : 22) : world <= 1024 ? 14 : 8, gap = least > 12 ? 2 : 1, pad = least > 12 ? 5 : 2, between = 6;
    const head = least > 12 ? 13 : 0;
    const columns = Math.min(perNode, Math.max(1, Math.floor((this.width - 2 * pad) / (least + gap))));
    const rows = Math.ceil(perNode / columns);
    const boxOf = (size) => columns * (size + gap) - gap + 2 * pad;
    const most = Math.max(1, Math.min(nodes, Math.floor((this.width + between) / (boxOf(least) + between))));
    // Cells grow until the boxes fill the width, in fewer columns as long as the board stays low. Full rows let what is
    // alike stand one above the other.
    const sizeOf = (across) => Math.min(34, ((this.width + between) / across - between - 2 * pad + gap) / columns - gap);
    const heightOf = (across) => Math.ceil(nodes / across) * (rows * (sizeOf(across) + gap) - gap + 2 * pad + head + between);
    const full = Array.from({ length: most }, (_, index) => most - index).filter((columns) => nodes % columns === 0);
    const fitting = full.filter((columns, index) => (index === 0 ? columns > most / 2 : heightOf(columns) <= LOW));
    const across = fitting.at(-1) ?? most;
    const size = sizeOf(across), height = heightOf(across);
    const boxWidth = boxOf(size), boxHeight = rows * (size + gap) - gap + 2 * pad + head;
    const svg = draw("svg", { viewBox: `0 0 ${this.width} ${height}`, tabindex: 0, role: "application" });
    const patterns = draw("defs", {}, svg);
    for (const [name, path] of Object.entries(PATTERNS)) {
      const pattern = draw("pattern", { id: `lit-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, patterns);
      draw("rect", { width: 6, height: 6, fill: `var(--${name})` }, pattern);
      draw("path", { d: path, stroke: "#fff7", "stroke-width": 1.4 }, pattern);
    }
    this.cells = [];
    for (let node = 0; node < nodes; node++) {
      const x = (node % across) * (boxWidth + between), y = Math.floor(node / across) * (boxHeight + between);
      draw("rect", { class: "node", x: x + .5, y: y + .5, width: boxWidth - 1, height: boxHeight - 1, rx: 4 }, svg);
      if (head) draw("text", { x: x + pad, y: y + 11 }, svg, word("node", { node }));
      for (let local = 0; local < perNode && node * perNode + local < world; local++) {
        const rank = node * perNode + local;
        const left = x + pad + (local % columns) * (size + gap), top = y + pad + head + Math.floor(local / columns) * (size + gap);
        this.cells.push(draw("rect", { class: "cell", "data-rank": rank, x: left, y: top, width: size, height: size, rx: size > 12 ? 4 : 2 }, svg));
        if (size >= 16) draw("text", { class: "number", x: left + size / 2, y: top + size / 2 + 3 }, svg, rank);
      }
    }
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("click", (event) => this.point(event, true));
    svg.addEventListener("keydown", (event) => this.key(event));
    this.board.replaceChildren(svg);
    this.svg = svg;
    this.lit = [];
    this.light();
  }

  point(event, hold = false) {
    const rank = event.target.dataset?.rank;
    if (rank === undefined || (this.held && !hold)) return;
    if (hold) this.held = !(this.held && Number(rank) === state.rank);
    this.chosen(Number(rank));
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -DATA.nodeSize, ArrowDown: DATA.nodeSize, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      this.held = true;
      this.chosen(Math.min(DATA.world - 1, Math.max(0, state.rank + moves[event.key])));
    } else if (event.key === "Enter" || event.key === " ") {
      this.held = !this.held;
    } else if (event.key === "Escape") {
      this.held = false;
    } else return;
    event.preventDefault();
  }

  light() {
    for (const cell of this.lit) { cell.style.fill = cell.style.fillOpacity = ""; cell.classList.remove("here"); delete cell.dataset.lit; }
    this.lit = [];
    const mark = (rank, name, share) => {
      const cell = this.cells[rank];
      cell.style.fill = `url(#lit-${name})`;
      cell.style.fillOpacity = share;
      cell.dataset.lit = cell.dataset.lit ? `${cell.dataset.lit} ${name}` : name;
      this.lit.push(cell);
    };
    for (const [name, dims] of shownViews()) {
      const members = group(state.layout, state.rank, dims);
      members.forEach((rank, index) => { if (rank !== state.rank) mark(rank, colourOf(name), strength(index, members.length)); });
    }
    const here = this.cells[state.rank];
    here.classList.add("here");
    here.dataset.lit = "here";
    here.style.fill = "var(--ink)";
    this.lit.push(here);
    this.svg.setAttribute("aria-label", word("rank", { rank: state.rank }));
  }
}

function colourOf(name) { return name in PATTERNS ? name : "fold"; }

// The sub-meshes and folds that are to be lit: [name, its dims].
function shownViews() {
  if (state.view === "") return DATA.dims.map((dim) => [dim, [dim]]);
  return [[state.view, DATA.folds[state.view] ?? [state.view]]];
}

// What the colours of the lit cells mean: first to last along each group.
function showScales(place) {
  const lit = shownViews().filter(([, dims]) => degree(state.layout, dims) > 1);
  place.replaceChildren(...lit.map(([name, dims]) => {
    const count = degree(state.layout, dims), steps = Math.min(count, 8);
    const shades = Array.from({ length: steps }, (_, step) => element("i", { style: `background:var(--${colourOf(name)});opacity:${strength(step, steps)}` }));
    return element("span", { "data-scale": name }, `${name} 0`, element("span", { class: "scale" }, ...shades), String(count - 1));
  }));
}
