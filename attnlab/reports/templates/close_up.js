(() => {
  const data = JSON.parse(document.getElementById("close-up-data").textContent);
  const root = document.getElementById("close-up");
  const find = (selector) => root.querySelector(selector);
  const token = find("#token"), head = find("#head");
  const SVG = find("svg").namespaceURI, CELL = 16, GAP = 2;
  let step = 0, at = { row: 0, column: 0 };  // of the reads; of the map of weights

  const put = (parent, name, text, attributes = {}) => {
    const node = parent.namespaceURI === SVG || name === "svg"
      ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    return parent.appendChild(node);
  };
  const clear = (node) => (node.replaceChildren(), node);
  const number = (value) => typeof value === "number" ? value : NaN;
  const show = (value) => typeof value === "number" ? String(+value.toPrecision(4)) : value;
  const spans = (runs) => runs.map(([first, count]) => count > 1 ? `${first} to ${first + count - 1}` : `${first}`)
    .join(", ");
  const positions = (runs) => `position${runs.length > 1 || runs[0][1] > 1 ? "s" : ""} ${spans(runs)}`;
  const picked = () => data.tokens[token.selectedIndex];
  const cell = () => data.cells?.[`${picked().row},${head.value}`];
  const which = () => find("input[name=which]:checked").value;
  const legend = (figure, entries) => {
    const list = clear(figure.querySelector(".legend"));
    for (const [name, text] of entries) {
      const entry = put(list, "span");
      const square = put(put(entry, "svg", "", { width: 16, height: 16, "aria-hidden": true }), "g", "", { class: name });
      put(square, "rect", "", { width: 16, height: 16, rx: 2 });
      if (name.includes("wrong")) put(square, "path", "", { d: "M4 4L12 12M12 4L4 12" });
      entry.append(` ${text}`);
    }
  };

  function facts() {
    const one = picked(), of = cell(), seq = data.seqs?.[one.seq];
    const parts = [];
    if (!seq) parts.push(`Token ${one.token} of sequence ${one.seq} is at position ${one.pos}.`);
    else {
      parts.push(`Sequence ${one.seq}: ${seq.ctx} tokens of context and ${seq.len - seq.ctx} new ones.`);
      parts.push(`Token ${one.token} is at position ${one.pos} and sees ${one.sees.length
        ? positions(one.sees) : "no position"}; head ${head.value} is of KV head ${
        Math.floor(head.value / data.group)}.`);
    }
    if (of) parts.push(of.wrong ? `${of.wrong} of its ${of.right.length} elements are wrong, by up to ${
      show(of.error)}.` : `Its elements are right: the largest error is ${show(of.error)}.`);
    find("#facts").textContent = parts.join(" ");
  }

  function values() {
    const figure = find("#values"), of = cell();
    figure.hidden = !of;
    if (!of) return;
    const numbers = { wrong: of.output.map(number), right: of.right.map(number) };
    numbers.difference = numbers.wrong.map((value, i) => value - numbers.right[i]);
    const names = { wrong: "Computed output", right: "Correct output", difference: "Computed minus correct" };
    const shown = numbers[which()];
    const finite = (which() === "difference" ? shown : [...numbers.wrong, ...numbers.right])
      .filter(Number.isFinite).map(Math.abs);
    const top = Math.max(...finite, 1e-30), width = 100 / shown.length;
    figure.querySelector("figcaption").textContent =
      `${names[which()]} of token ${picked().token}, head ${head.value}: one bar for each of ${shown.length} elements, from −${
        show(top)} to ${show(top)}`;
    const svg = clear(figure.querySelector("svg"));
    svg.setAttribute("aria-label", names[which()]);
    shown.forEach((value, i) => {
      const is = Number.isFinite(value), size = is ? Math.abs(value) / top * 50 : 50;
      const bar = put(svg, "g", "", { class: is ? which() === "difference" ? "off" : "read" : "wrong" });
      put(bar, "title", `element ${i}: ${show(which() === "right" ? of.right[i] : which() === "wrong" ? of.output[i] : value)}`);
      put(bar, "rect", "", { x: i * width, width: width * 0.8, height: Math.max(size, 0.5),
        y: value > 0 || !is ? 50 - size : 50 });
    });
    legend(figure, shown.every(Number.isFinite) ? [] : [["wrong", "not a finite number"]]);
    const body = clear(figure.querySelector("tbody"));
    numbers.difference.forEach((value, i) => {
      const row = put(body, "tr");
      for (const text of [i, of.output[i], of.right[i], value]) put(row, "td", String(show(text)), { class: "number" });
    });
  }

  function reads() {
    const figure = find("#reads"), of = cell(), seq = data.seqs?.[picked().seq];
    figure.hidden = !seq;
    if (!seq) return;
    const steps = of?.steps ?? [], marked = steps.filter(([, why]) => why).length;
    step = Math.min(step, Math.max(0, steps.length - 1));
    figure.querySelector("figcaption").textContent = steps.length
      ? `The kernel reads the cache in ${steps.length} ${steps.length > 1 ? "steps" : "step"}${
        marked ? `; ${marked} of them ${marked > 1 ? "are" : "is"} marked` : ""}`
      : "Slots of the sequence; the reads of this token were not recorded";
    const bar = clear(figure.querySelector(".steps"));
    steps.forEach(([, why], i) => {
      const button = put(bar, "button", why ? `${i + 1} ✗` : `${i + 1}`, { type: "button",
        class: why ? "marked" : "", tabindex: i === step ? 0 : -1, "aria-label": `step ${i + 1}${why ? ", marked" : ""}` });
      if (i === step) button.setAttribute("aria-current", "step");
      button.onclick = () => { step = i; reads(); bar.children[i].focus(); };
    });
    const text = clear(figure.querySelector(".step"));
    const now = steps.length ? data.steps[steps[step][0]] : null;
    if (now) {
      put(text, "span", `Step ${step + 1}, program ${now.program}: `);
      now.lines.forEach((line, i) => {
        text.append(`${i ? "; " : ""}${line} `);
        put(text, "code", data.lines[line]);
      });
      text.append(`. ${about(steps[step], now, seq)}`);
      if (of.unread.length) put(text, "b", ` No step reads ${positions(of.unread)}.`, { class: "wrong" });
    }
    grid(figure, seq, now);
  }

  function about([, why, sums], now, seq) {
    const count = now.slots.reduce((sum, [, n]) => sum + n, 0), size = data.block_size;
    const blocks = [...new Set(now.slots.flatMap(([first, n]) =>
      Array.from({ length: Math.floor((first + n - 1) / size) - Math.floor(first / size) + 1 },
        (_, i) => Math.floor(first / size) + i)))];
    return `It reads ${count} slots of block${blocks.length > 1 ? "s" : ""} ${blocks.join(", ")}.${
      sums.length ? ` Its keys have the weight ${show(sums[0])} in all; ${show(sums[1])} is right.` : ""}${
      why ? ` Marked: ${why}.` : ""}`;
  }

  function grid(figure, seq, now) {
    const size = data.block_size, body = clear(figure.querySelector("tbody"));
    const inStep = new Set((now?.slots ?? []).flatMap(([first, n]) => Array.from({ length: n }, (_, i) => first + i)));
    const seen = (position) => picked().sees.some(([first, n]) => position >= first && position < first + n);
    const found = new Set();
    for (const [block, label, held] of seq.blocks) {
      const row = put(body, "tr"), width = held.length * (CELL + GAP);
      put(row, "th", `block ${block} ${label}`, { scope: "row" });
      const svg = put(put(row, "td"), "svg", "", { width, height: CELL, viewBox: `0 0 ${width} ${CELL}`, role: "img" });
      held.forEach((position, i) => {
        const isRead = inStep.has(block * size + i), own = position >= 0;
        const name = isRead ? own ? "read" : "wrong" : own && seen(position) ? "right" : "idle";
        found.add(name);
        const square = put(svg, "g", "", { class: name });
        put(square, "title", `block ${block}, slot ${i}: ${own ? `token ${position}` : position === -1 ? "empty"
          : "a token of another sequence"}${isRead ? ", read in this step" : ""}${own ? seen(position)
          ? ", visible to the token" : ", not visible to the token" : ""}`);
        put(square, "rect", "", { x: i * (CELL + GAP), width: CELL, height: CELL, rx: 2 });
        if (name === "wrong") put(square, "path", "", { d: `M${i * 18 + 4} 4l8 8m0 -8l-8 8` });
      });
    }
    if (seq.left_out) put(put(body, "tr"), "td", `and ${seq.left_out} further blocks`, { colspan: 2 });
    legend(figure, [["read", "read in this step"], ["wrong", "read in this step, holds no token of the sequence"],
      ["right", "visible to the token"], ["idle", "other slots"]].filter(([name]) => found.has(name)));
  }

  const LEAST = -8;  // log10 of the smallest weight with a colour
  function weights() {
    const figure = find("#weights"), map = data.weights?.[`${picked().seq},${head.value}`];
    figure.hidden = !Object.keys(data.weights ?? {}).length;
    if (figure.hidden) return;
    const caption = figure.querySelector("figcaption"), canvas = figure.querySelector("canvas");
    canvas.hidden = !map;
    if (!map) {
      caption.textContent = `The weights of sequence ${picked().seq} and head ${head.value} are not in this page`;
      legend(figure, []);
      clear(figure.querySelector(".place"));
      return;
    }
    const names = { wrong: "Measured", right: "Expected", difference: "Measured minus expected" };
    const bad = map.wrong.reduce((sum, row) => sum + row.length, 0);
    caption.textContent = `${names[which()]} weights, keys (to the right) against tokens (down): ${
      bad ? `${bad} ${bad === 1 ? "weight is" : "weights are"} wrong, outlined` : "no weight is wrong"}${map.columns < map.of
      ? `; keys ${map.first} to ${map.first + map.columns - 1} of ${map.of}` : ""}`;
    canvas.setAttribute("aria-label", caption.textContent);
    const width = Math.max(6, Math.min(CELL, Math.floor(900 / map.columns))), height = CELL;
    const scale = devicePixelRatio || 1, wide = map.columns * width, high = map.rows.length * height;
    Object.assign(canvas, { width: wide * scale, height: high * scale });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    paint(pen, map, width, height);
    place(figure, map);
    legend(figure, [["read", which() === "difference" ? "too much" : "weight; stronger is more"],
      ...(which() === "difference" ? [["off", "too little"]] : []), ["outlined", "wrong"]]);
  }

  function paint(pen, map, width, height) {
    const css = getComputedStyle(document.documentElement), colour = (name) => css.getPropertyValue(name).trim();
    const each = (draw) => map.rows.forEach((_, r) => map.measured[r].forEach((__, c) => draw(r, c)));
    let top = 0.01;
    each((r, c) => { const d = Math.abs(number(map.measured[r][c]) - map.expected[r][c]); if (d > top) top = d; });
    each((r, c) => {
      const value = which() === "right" ? map.expected[r][c] : number(map.measured[r][c]);
      const off = number(map.measured[r][c]) - map.expected[r][c];
      let share = value > 0 ? Math.max(0, 1 - Math.log10(value) / LEAST) : 0, paintIn = "--link";
      if (which() === "difference") [share, paintIn] = [Math.abs(off) / top, off > 0 ? "--link" : "--amber"];
      pen.globalAlpha = 1;
      pen.fillStyle = Number.isFinite(share) ? colour("--soft") : colour("--purple");
      pen.fillRect(c * width, r * height, width, height);
      if (!(share > 0)) return;
      pen.globalAlpha = Math.min(1, 0.1 + 0.9 * share);
      pen.fillStyle = colour(paintIn);
      pen.fillRect(c * width, r * height, width, height);
    });
    pen.globalAlpha = 1;
    const edge = (column, name, size) => {
      const x = (column - map.first) * width;
      if (x <= 0 || x >= map.columns * width) return;
      pen.fillStyle = colour(name);
      pen.fillRect(x - size / 2, 0, size, map.rows.length * height);
    };
    map.tiles.forEach((column) => edge(column, "--quiet", 1));
    edge(map.context, "--text", 2);
    edge(map.own, "--text", 1);
    pen.lineWidth = 2;
    pen.strokeStyle = colour("--red");
    map.wrong.forEach((row, r) => row.forEach((c) => pen.strokeRect(c * width + 1, r * height + 1, width - 2, height - 2)));
    pen.strokeStyle = colour("--text");
    const own = map.rows.indexOf(picked().row);
    if (own >= 0) pen.strokeRect(1, own * height + 1, map.columns * width - 2, height - 2);
    pen.lineWidth = 3;
    pen.strokeRect(at.column * width + 1, at.row * height + 1, width - 2, height - 2);
  }

  function place(figure, map) {
    at.row = Math.max(0, Math.min(at.row, map.rows.length - 1));
    at.column = Math.max(0, Math.min(at.column, map.columns - 1));
    const column = map.first + at.column, row = map.rows[at.row];
    const key = column >= map.own ? `slots of ${map.foreign[column - map.own]}`
      : column >= map.positions ? `slot ${column - map.positions} after the end` : `key ${column}`;
    figure.querySelector(".place").textContent = `Row ${row}, ${key}: measured ${show(map.measured[at.row][at.column])}, expected ${
      show(map.expected[at.row][at.column])}${map.wrong[at.row].includes(at.column) ? ", wrong" : ""}. Line: end of the context; thin lines: tiles.`;
  }

  const draw = () => { facts(); values(); reads(); weights(); };
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  find("#weights canvas").onkeydown = (event) => {
    if (!(event.key in move)) return;
    event.preventDefault();
    at = { row: at.row + move[event.key][0], column: at.column + move[event.key][1] };
    place(find("#weights"), data.weights[`${picked().seq},${head.value}`]);
    weights();
  };
  find("#weights canvas").onclick = (event) => {
    const canvas = event.target, map = data.weights[`${picked().seq},${head.value}`];
    at = { row: Math.floor(event.offsetY / CELL), column: Math.floor(event.offsetX / (canvas.clientWidth / map.columns)) };
    weights();
  };
  find(".steps").onkeydown = (event) => {
    const last = find(".steps").children.length - 1;
    const next = { ArrowLeft: step - 1, ArrowRight: step + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    step = Math.max(0, Math.min(last, next));
    reads();
    find(".steps").children[step].focus();
  };

  for (const one of data.tokens)
    put(token, "option", `sequence ${one.seq}, token ${one.token}${one.wrong.length ? " ✗" : ""}`);
  const heads = () => {
    const kept = head.value;
    clear(head);
    for (const one of data.heads)
      put(head, "option", `${one}${picked().wrong.includes(one) ? " ✗" : ""}`, { value: one });
    if (kept) head.value = kept;
  };
  const pick = (row, column) => {
    const index = data.tokens.findIndex((one) => one.row === row);
    if (index < 0 || !data.heads.includes(column)) return;
    token.selectedIndex = index;
    heads();
    head.value = column;
    begin();
  };
  const begin = () => {
    step = Math.max(0, (cell()?.steps ?? []).findIndex(([, why]) => why));
    const map = data.weights?.[`${picked().seq},${head.value}`], row = map?.rows.indexOf(picked().row) ?? -1;
    if (row >= 0) at = { row, column: map.wrong[row][0] ?? 0 };
    draw();
  };
  token.onchange = () => { heads(); begin(); };
  head.onchange = begin;
  for (const radio of root.querySelectorAll("input[name=which]")) radio.onchange = draw;
  for (const square of document.querySelectorAll(".pictures g[data-at]")) {
    const [row, column] = square.dataset.at.split(",").map(Number);
    square.onclick = () => { pick(row, column); root.scrollIntoView({ block: "nearest" }); };
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  if (data.of) {
    const [tokens, allTokens, heads_, allHeads] = data.of;
    find("#left-out").textContent = tokens < allTokens || heads_ < allHeads
      ? `The page has ${tokens} of ${allTokens} tokens and ${heads_} of ${allHeads} heads, wrong ones first.` : "";
  }
  root.hidden = false;
  heads();
  const first = data.tokens.findIndex((one) => one.wrong.some((h) => data.heads.includes(h)));
  if (first >= 0) pick(data.tokens[first].row, data.tokens[first].wrong.find((h) => data.heads.includes(h)));
  else begin();
})();
