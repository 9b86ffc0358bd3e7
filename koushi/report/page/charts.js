// Bars, waterfall and timeline, all of figures that the plan has worked out.
const SHADES = ["var(--state)", "var(--dp_replicate)", "var(--pp)", "var(--dp_shard)", "var(--cp)", "var(--tp)", "var(--fold)", "var(--waste)", "var(--compute)", "var(--soft)", "var(--ink)"];

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < units.length - 1) { count /= 1024; unit++; }
  return unit ? `${count.toFixed(2)} ${units[unit]}` : `${Math.round(count)} B`;
}

function secondsText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e6).toFixed(0)} µs`;
}

function percent(share) { return `${(share * 100).toFixed(1)}%`; }

function showMemory(place, layout) {
  const most = Math.max(layout.limit ?? 0, ...layout.memory.map((each) => each.device));
  const bars = layout.memory.map((each) => {
    const track = element("div", { class: "track", role: "img", "aria-label": `${bytesText(each.device)}: ${each.moment}`, title: each.moment });
    let from = 0;
    each.kinds.forEach((bytes, index) => {
      if (!bytes) return;
      const part = element("i", { style: `left:${100 * from / most}%;width:${100 * bytes / most}%;background:${SHADES[index % SHADES.length]}`, title: `${DATA.kinds[index]}: ${bytesText(bytes)}` });
      track.append(part);
      from += bytes;
    });
    if (layout.limit) track.append(element("i", { class: "limit", style: `left:calc(${100 * layout.limit / most}% - 2px)` }));
    const over = layout.limit && each.device > layout.limit;
    return element("div", { class: "bar" }, element("span", {}, `pp ${each.pp}`), track, element("span", over ? { class: "bad" } : {}, bytesText(each.device)));
  });
  const used = DATA.kinds.map((_, index) => layout.memory.some((each) => each.kinds[index]));
  const keys = DATA.kinds.flatMap((kind, index) => used[index] ? [legend(SHADES[index % SHADES.length], kind)] : []);
  place.replaceChildren(...bars, element("p", { class: "key" }, ...keys));
}

function legend(colour, text) {
  return element("span", {}, element("span", { class: "chip", style: `background:${colour}` }), text);
}

function showWaterfall(place, layout) {
  let from = 0;
  const bars = layout.waterfall.map(([name, seconds, shade]) => {
    const colour = shade === "compute" ? "var(--compute)" : DATA.dims.includes(shade) ? `var(--${shade})` : "var(--waste)";
    const track = element("div", { class: "track" }, element("i", { style: `left:${100 * from / layout.step}%;width:${100 * seconds / layout.step}%;min-width:1px;background:${colour}` }));
    from += seconds;
    return element("div", { class: "bar wide" }, element("span", {}, name), track, element("span", {}, `${secondsText(seconds)} · ${percent(seconds / layout.step)}`));
  });
  place.replaceChildren(...bars);
}

function showGantt(canvas, hint, key, layout) {
  const timeline = layout.timeline;
  canvas.hidden = key.hidden = !timeline;
  if (layout.shape[0] === 1) { hint.textContent = word("noPipeline"); return; }
  hint.textContent = word("pipelineHint", { schedule: layout.schedule, microbatches: layout.microbatches, bubble: percent(layout.bubble) });
  if (!timeline) { hint.textContent += ` ${word("noTimeline")}`; return; }
  const rows = timeline.map((text) => [...text.matchAll(/([FBIW])(\d+)@(\d+)\+(\d+)/g)].map(([, kind, ...numbers]) => [kind, ...numbers.map(Number)]));
  const row = 18, left = 34, width = Math.max(320, canvas.parentElement.clientWidth), ratio = window.devicePixelRatio || 1;
  const wide = Math.max(width, Math.min(6000, left + rows[0].length * 7));
  canvas.width = wide * ratio; canvas.height = (rows.length * row + 4) * ratio;
  canvas.style.width = `${wide}px`; canvas.style.height = `${rows.length * row + 4}px`;
  canvas.setAttribute("aria-label", hint.textContent);
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colours = { F: style.getPropertyValue("--pp"), B: style.getPropertyValue("--tp"), I: style.getPropertyValue("--dp_replicate"), W: style.getPropertyValue("--dp_shard") };
  pen.scale(ratio, ratio);
  pen.font = "10px system-ui, sans-serif"; pen.textBaseline = "middle";
  const scale = (wide - left - 2) / DATA.ticks;
  rows.forEach((actions, index) => {
    const top = index * row + 2;
    pen.fillStyle = style.getPropertyValue("--cell"); pen.fillRect(left, top, wide - left - 2, row - 3);
    pen.fillStyle = style.getPropertyValue("--soft"); pen.fillText(`pp ${index}`, 0, top + row / 2);
    for (const [kind, microbatch, start, length] of actions) {
      const x = left + start * scale, span = Math.max(length * scale - .6, .6);
      pen.fillStyle = colours[kind]; pen.fillRect(x, top, span, row - 3);
      if (span > 11) { pen.fillStyle = "#fff"; pen.fillText(microbatch, x + 2, top + row / 2 - 1, span - 3); }
    }
  });
  const kinds = new Set(rows.flat().map((action) => action[0]));
  key.replaceChildren(...word("ganttKey").filter(([kind]) => kinds.has(kind)).map(([kind, text]) => legend(colours[kind], text)));
}
