// The page's state and how its parts follow it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { rank: 0, view: "", key: DATA.base, layout: DATA.layouts[DATA.base], event: 0, parameter: 0 };
const at = (id) => document.getElementById(id);
const SLIDERS = ["pp", "dp_replicate", "tp"];
const lattice = new Lattice(at("board"), (rank) => { state.rank = rank; lattice.light(); showRank(); showParameter(); });

function ranksText(ranks) {
  const shown = ranks.slice(0, 16).join(" ");
  return ranks.length > 16 ? `${shown} … ${word("more", { count: ranks.length - 16 })}` : shown;
}

function chip(name) { return element("span", { class: "chip", style: `background:var(--${colourOf(name)})` }); }

function showRank() {
  const here = coordinate(state.layout, state.rank);
  const rows = shownViews().map(([name, dims]) => {
    const members = group(state.layout, state.rank, dims);
    const index = dims.length === 1 ? here[DATA.dims.indexOf(dims[0])] : members.indexOf(state.rank);
    return element("tr", {}, element("td", {}, chip(name), name), element("td", { class: "n" }, String(index)),
      element("td", { "data-group": name }, members.length === 1 ? word("only") : ranksText(members)));
  });
  const head = element("tr", {}, ...["submesh", "coordinate", "ranks"].map((key) => element("th", key === "coordinate" ? { class: "n" } : {}, word(key))));
  at("rank").replaceChildren(
    element("h3", {}, `${word("rank", { rank: state.rank })}, ${word("node", { node: Math.floor(state.rank / DATA.nodeSize) })}`),
    element("table", {}, head, ...rows));
}

function showSubmesh() {
  const busy = DATA.dims.filter((dim) => degree(state.layout, [dim]) > 1);
  const view = state.view || (busy.length === 1 ? busy[0] : "");
  const place = at("submesh"), dims = DATA.folds[view] ?? [view];
  if (view === "") { place.replaceChildren(...allSubmeshes(busy), element("p", { class: "hint" }, word(busy.length ? "choose" : "noGroups"))); return; }
  const about = state.layout.submeshes[view], count = degree(state.layout, dims);
  const lines = [element("h3", {}, chip(view), `${view}: ${word(view)}`),
    element("p", {}, word(count === DATA.world ? "oneGroup" : "groups", { groups: DATA.world / count, degree: count }))];
  if (count === 1) lines.push(element("p", {}, word("quiet")));
  else if (about) {
    lines.push(element("p", {}, `${word("link")}: ${about.link} (${word(about.crosses ? "across" : "inside")})`));
    lines.push(element("p", {}, `${word("total")}: ${bytesText(about.bytes)}, ${secondsText(about.seconds)}, ${word("exposed")} ${secondsText(about.exposed)}`));
    const head = element("tr", {}, ...["operation", "phase", "bytes", "calls"].map((key, index) => element("th", index > 1 ? { class: "n" } : {}, word(key))));
    lines.push(element("table", {}, head, ...about.rows.map(([operation, phase, dtype, bytes, calls]) => element("tr", {},
      element("td", {}, `${operation} (${dtype})`), element("td", {}, word(phase)), element("td", { class: "n" }, bytesText(bytes)), element("td", { class: "n" }, String(calls))))));
  }
  place.replaceChildren(...lines);
}

// What travels on each sub-mesh in a step.
function allSubmeshes(busy) {
  if (!busy.length) return [];
  const head = element("tr", {}, ...["submesh", "link", "bytes", "exposed"].map((key, index) => element("th", index > 1 ? { class: "n" } : {}, word(key))));
  return [element("table", {}, head, ...busy.map((dim) => {
    const about = state.layout.submeshes[dim];
    return element("tr", { "data-submesh": dim }, element("td", {}, chip(dim), dim), element("td", {}, about ? word(about.crosses ? "across" : "inside") : "—"),
      element("td", { class: "n" }, about ? bytesText(about.bytes) : "—"), element("td", { class: "n" }, about ? secondsText(about.exposed) : "—"));
  }))];
}

function showViews() {
  const options = [["", word("allViews")], ...DATA.dims.map((dim) => [dim, dim]), ...Object.keys(DATA.folds).map((name) => [name, word("fold", { name })])];
  at("views").replaceChildren(...options.map(([name, text]) => {
    const button = element("button", { type: "button", role: "radio", "data-view": name, "aria-checked": String(state.view === name) });
    if (name) button.append(chip(name));
    button.append(text);
    button.addEventListener("click", () => { state.view = name; showViews(); lattice.light(); showScales(at("scales")); showRank(); showSubmesh(); at("views").querySelector(`[data-view="${name}"]`).focus(); });
    return button;
  }));
}

function showFigures() {
  const layout = state.layout, peak = Math.max(...layout.memory.map((each) => each.device));
  const figures = [["devices", DATA.world], ["step", secondsText(layout.step)], ["rate", Math.round(layout.rate).toLocaleString("en")],
    ["mfu", layout.mfu === null ? word("unknown") : percent(layout.mfu)], ["bubble", percent(layout.bubble)], ["peak", bytesText(peak)]];
  at("figures").replaceChildren(...figures.map(([key, value]) => element("div", { class: "figure", "data-figure": key }, element("b", {}, String(value)), element("span", {}, word(key)))),
    element("div", { class: "figure" }, element("b", { class: layout.fits ? "good" : "bad", id: "fits" }, word(layout.fits ? "fits" : "fitsNot")), element("span", {}, lacking(layout) || DATA.hardware)));
}

// What a layout lacks, where and when; empty where it fits.
function lacking(layout) {
  if (layout.fits) return "";
  const fullest = layout.memory.reduce((one, other) => (other.device > one.device ? other : one));
  return word("lacks", { bytes: bytesText(fullest.device - layout.limit), pp: fullest.pp, moment: fullest.moment });
}

function showParameter() {
  const parameter = DATA.parameters[state.parameter];
  showEvents(at("events"), at("scrubber"), state.layout, parameter);
  showBlock(at("block"), state.layout, parameter);
}

function makeSliders() {
  const values = Object.fromEntries(SLIDERS.map((dim) => [dim, state.layout.shape[DATA.dims.indexOf(dim)]]));
  const shard = element("output", { id: "dp_shard-value" });
  const rows = SLIDERS.map((dim) => {
    const choices = DATA.choices[dim], output = element("output", { id: `${dim}-value` }, String(values[dim]));
    const input = element("input", { type: "range", id: `slider-${dim}`, min: 0, max: choices.length - 1, value: choices.indexOf(values[dim]), "aria-valuetext": values[dim] });
    input.addEventListener("input", () => {
      values[dim] = choices[input.value];
      output.textContent = values[dim];
      input.setAttribute("aria-valuetext", values[dim]);
      choose(values);
    });
    return element("div", { class: "slider" }, element("label", { for: `slider-${dim}` }, chip(dim), dim), input, output);
  });
  rows.splice(2, 0, element("div", { class: "slider" }, element("span", {}, chip("dp_shard"), "dp_shard"), element("span", { class: "hint" }, word("follows")), shard));
  at("sliders").replaceChildren(...rows);
  choose(values);
}

function choose(values) {
  const key = SLIDERS.map((dim) => values[dim]).join("-"), layout = DATA.layouts[key];
  const problem = layout === undefined ? DATA.problems[key] ?? "" : layout.problem ?? "";
  at("problem").textContent = problem;
  at("problem").hidden = !problem;
  at("dp_shard-value").textContent = layout ? layout.shape[DATA.dims.indexOf("dp_shard")] : "—";
  if (problem) return;
  state.key = key;
  state.layout = layout;
  at("yaml").textContent = DATA.yaml.map(([name, dim]) => `  ${name}: ${layout.shape[DATA.dims.indexOf(dim)]}`).reduce((text, line) => `${text}\n${line}`, "parallelism:");
  showLayout();
}

function showLayout() {
  at("about").textContent = `${DATA.about} [${DATA.dims.map((dim, axis) => `${dim}=${state.layout.shape[axis]}`).join(", ")}]`;
  showFigures();
  lattice.svg && lattice.light();
  showScales(at("scales"));
  showRank();
  showSubmesh();
  showMemory(at("memory-bars"), state.layout);
  showWaterfall(at("waterfall"), state.layout);
  showGantt(at("gantt"), at("pipeline-hint"), at("gantt-key"), state.layout);
  showParameter();
}

function showAll() {
  document.documentElement.lang = language;
  for (const place of document.querySelectorAll("[data-word]")) place.textContent = word(place.dataset.word, { world: DATA.world });
  at("language").textContent = language === "en" ? "日本語" : "English";
  at("name").textContent = DATA.name;
  showViews();
  if (lattice.width) lattice.build();
  makeSliders();
}

at("theme").addEventListener("click", () => { const root = document.documentElement; root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; showGantt(at("gantt"), at("pipeline-hint"), at("gantt-key"), state.layout); });
at("language").addEventListener("click", () => { language = language === "en" ? "ja" : "en"; showAll(); });
at("copy").addEventListener("click", async () => {
  const text = at("yaml").textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    const selection = getSelection(); selection.selectAllChildren(at("yaml")); document.execCommand("copy"); selection.removeAllRanges();
  }
  at("copy").textContent = word("copied");
  setTimeout(() => { at("copy").textContent = word("copy"); }, 1500);
});
at("scrubber").addEventListener("input", (event) => { state.event = Number(event.target.value); showParameter(); });
at("parameter-name").append(...DATA.parameters.map((parameter, index) => element("option", { value: index }, parameter.name)));
at("parameter-name").addEventListener("change", (event) => { state.parameter = Number(event.target.value); state.event = 0; showParameter(); });
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
lattice.resize();
showAll();
