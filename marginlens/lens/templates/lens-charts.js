/* The maps, the curve, and the summary of recorded rows. */
const charts = (() => {
  const {abs, exp, min, max, PI, round} = Math,
    RAD = PI / 180,
    $ = id => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let cached = {};
  const LIMITS = [2, 3, 10, 30, 100, 1e3, 1e4, 1e6, 1e9, 1e15, 1e30, 1e60, 1e150].map(Math.log);
  const SIZES = [
    0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 8, 10, 15, 20, 30, 50, 80, 100, 200, 500, 1e3, 1e4, 1e5, 1e6, 1e9, 1e15, 1e30,
  ];
  const PLACES = {plain: "Eq. 3", margin: "Theorem 4.1, Eq. 6", emphasis: "Eq. 11", ratio: "Lemma 4.2, Alg. 4"};
  const THREE = [
    [0, "0"],
    [0.5, "0.5"],
    [1, "1"],
  ];

  /* The values of both maps. They are kept until a parameter changes, because they take ten milliseconds. */
  function compute(list) {
    const {tau, beta, maps} = model.state,
      size = maps === "gradients";
    const at = (angle, q) => lens.multipliers(list, lens.rowAt(angle, q, tau), beta);
    const border = lens.repelledFrom(list);
    if (size) {
      const left = draw.grid((angle, q) => abs(lens.gradients(list, lens.rowAt(angle, q, tau), beta).positive));
      return {left, right: null, limit: draw.limit(left, SIZES), border};
    }
    const right = new Float64Array(draw.grid(() => 0).length);
    let k = 0;
    const left = draw.grid((angle, q) => {
      const found = at(angle, q);
      right[k++] = found.negative;
      return maps === "split" ? found.positive - found.negative : found.positive;
    });
    return {left, right, limit: draw.limit([...left, ...right], LIMITS), border};
  }

  const theme = () => (dark.matches ? "dark" : "light");
  function heat(values, limit, size) {
    const [palette, level] = size ? ["size", x => x / limit] : [theme(), x => 0.5 + x / limit / 2];
    return (
      `<image href="${draw.image(values, palette, level)}" x="${draw.BOX.x}" y="${draw.BOX.y}" width="${draw.BOX.w}" ` +
      `height="${draw.BOX.h}" preserveAspectRatio="none"/>`
    );
  }

  /* The line where the weight is 1, or a word where it is the same everywhere. */
  function ones(values, border) {
    const least = values.reduce((a, b) => min(a, b)),
      most = values.reduce((a, b) => max(a, b));
    if (most - least < 1e-9)
      return (
        `<text class="mid halo" x="${draw.BOX.x + draw.BOX.w / 2}" y="${draw.BOX.y + 30}">` +
        `${abs(most) < 1e-9 ? "1 everywhere: as the plain loss" : `× ${draw.short(exp(most))} everywhere`}</text>`
      );
    const inside = values.map((x, i) => ((((i % draw.COLUMNS) + 0.5) / draw.COLUMNS) * PI > border ? -99 : x));
    const d = draw.contour(inside);
    return `<path class="one-halo" d="${d}"/><path class="one" d="${d}"/>`;
  }
  const dot = (theta, q, kind = "") =>
    `<circle class="here ${kind}" cx="${draw.px(theta)}" cy="${draw.py(q)}" r="6.5"/>`;

  /* The still part of each map: heat, line, hatch, recorded rows. */
  function maps(list) {
    const {state} = model,
      size = state.maps === "gradients",
      split = state.maps === "split",
      rows = model.joint();
    const found = (cached = compute(list)),
      {border} = found;
    const over = rows ? draw.bubbles(rows) : "";
    const names = size
      ? ["Gradient of a positive", "Gradient of a negative"]
      : split
        ? ["Weight on the positive alone", "Weight on the whole row"]
        : ["Weight on the positive", "Weight on each negative"];
    $("left-name").textContent = names[0];
    $("right-name").textContent = names[1];
    $("left").firstElementChild.innerHTML =
      heat(found.left, found.limit, size) +
      (size ? "" : ones(found.left, border)) +
      draw.hatched(border) +
      over +
      draw.frame("q̃, the positive's probability", THREE);
    if (!size)
      $("right").firstElementChild.innerHTML =
        heat(found.right, found.limit, false) +
        ones(found.right, Infinity) +
        over +
        draw.frame("q̃, the positive's probability", THREE);
    const chosen = list.map(factor =>
      factor.name === "attenuation" ? `Eq. 12, Alg. ${factor.kind === "I" ? 5 : 6}` : PLACES[factor.name],
    );
    const places =
      [...new Set(chosen.length ? chosen : [PLACES.plain])].join("; ") + (list.length > 1 ? "; product: Eq. 9" : "");
    const margin = state.on.margin && list.length === 1;
    $("left-equation").textContent = size
      ? `Fig. 1: size of dL/dθ⁺. ${places}`
      : split
        ? `${margin ? "Fig. 2, left: sin(θ + m1) / sin θ. " : "Positive's weight over the negatives'. "}${places}`
        : `It multiplies dL/dθ of the positive. ${places}`;
    $("right-equation").textContent = size
      ? "Fig. 1: size of dL/dθ⁻, with the positive where it stands. Eq. 3"
      : split && margin
        ? "Fig. 2, right: the ratio, on positive and negatives. Lemma 4.2"
        : `It multiplies dL/dθ of each negative. ${places}`;
    cached.places = places;
    scale(found.limit, size);
  }

  /* The colour bar. */
  function scale(limit, size) {
    const canvas = document.createElement("canvas"),
      palette = draw.palettes[size ? "size" : theme()];
    canvas.width = 256;
    canvas.height = 1;
    const context = canvas.getContext("2d");
    palette.forEach((colour, i) => {
      context.fillStyle = `rgb(${colour.join()})`;
      context.fillRect(i, 0, 1, 1);
    });
    const most = size ? draw.short(limit) : draw.tick(exp(limit));
    const words = size ? ["0", `${most} or more`] : [`weaker, ÷ ${most}`, `× ${most}, stronger`];
    $("scale").replaceChildren(words[0], canvas, words[1], ...(size ? [] : [" · ", "on the line the weight is 1"]));
  }

  /* Draw the maps and the curve; maps are made anew only if a parameter changed. */
  function render(list, effect, plain, {row, positive, negative}, stale) {
    const {state} = model,
      theta = model.angle(state.positive),
      size = state.maps === "gradients",
      split = state.maps === "split",
      {q} = effect;
    if (stale) maps(list);
    $("left").lastElementChild.innerHTML = $("right").lastElementChild.innerHTML = dot(theta, q);
    if (size) {
      const values = draw.grid((angle, share) => lens.plainNegative(angle, share, state.tau, state.beta) * negative);
      const places = state.negatives.map((degrees, j) =>
        dot(model.angle(degrees), (1 - q) * effect.shares[j], "minus"),
      );
      $("right").firstElementChild.innerHTML =
        heat(values, cached.limit, true) +
        draw.frame("q, the negative's probability", THREE, "θ, the negative's angle");
      $("right").lastElementChild.innerHTML = places.join("");
    }
    const here = `Here, at ${round(theta / RAD)}° and q̃ = ${draw.short(q)}: `;
    $("left-reads").textContent =
      here +
      (size
        ? `${draw.short(abs(effect.positive))} (plain ${draw.short(plain.positive)})`
        : `× ${draw.short(split ? positive / negative : positive)}`);
    $("right-reads").textContent = size ? "Dots are the six negatives." : `${here}× ${draw.short(negative)}`;
    curve(list, theta, row);
  }

  /* Both weights over the angle, the negatives held where they are. */
  function curve(list, theta, row) {
    const points = 180,
      up = [],
      away = [],
      each = [],
      logs = [];
    const border = lens.repelledFrom(list),
      rows = model.joint();
    for (let i = 0; i < points; i++) {
      const angle = (PI * (i + 0.5)) / points,
        here = {...row, theta: angle, cos: Math.cos(angle), sin: Math.sin(angle)};
      const found = lens.multipliers(list, here, model.state.beta);
      up.push(found.sign > 0 ? found.positive : NaN);
      away.push(found.sign < 0 ? found.positive : NaN);
      each.push(found.negative);
      logs.push(found.positive, found.negative);
    }
    const limit = draw.limit(logs, LIMITS),
      share = x => 0.5 + x / limit / 2,
      {BOX} = draw;
    const most = draw.tick(exp(limit)),
      half = `<rect x="${BOX.x}" width="${BOX.w}" height="${BOX.h / 2}"`;
    const ticks = [
      [1, `× ${most}`],
      [0.5, "1"],
      [0, `÷ ${most}`],
    ];
    $("curve").innerHTML =
      `${half} y="${BOX.y}" class="tint up"/>${half} y="${BOX.y + BOX.h / 2}" class="tint down"/>` +
      (rows
        ? draw.histogram(
            rows.theta,
            rows.counts.map(line => line.reduce((a, b) => a + b, 0)),
          )
        : "") +
      draw.hatched(border) +
      `<path class="axis" d="M${BOX.x} ${BOX.y + BOX.h / 2}h${BOX.w}"/>` +
      draw.line(each.map(share), "second") +
      draw.line(up.map(share), "") +
      draw.line(away.map(share), "away") +
      `<path class="axis" d="M${draw.px(theta)} ${BOX.y}v${BOX.h}"/>` +
      draw.frame("weight", ticks);
    $("curve-name").textContent = "Weight over the angle";
    $("curve-reads").textContent = `Solid: the positive. Dashed: each negative.${border < PI ? " Red: repelled." : ""}`;
    $("curve-equation").textContent =
      `The positive turns, and these negatives stay. ${cached.places}${rows ? ". Bars: recorded angles" : ""}`;
  }

  /* Say what the effect does to the recorded rows. */
  function summary(list) {
    const {state, data} = model;
    if (!data.runs.length) return;
    const rows = model.joint(),
      percent = x => `${x > 0 && x < 0.001 ? "under 0.1" : (100 * x).toFixed(1)} %`;
    $("step-of").hidden = !rows;
    $("summary").hidden = !rows;
    if (!rows) return;
    const run = data.runs[state.run],
      found = lens.summary(rows, list, state.tau, state.beta);
    $("step").max = run.steps.length - 1;
    $("step").value = state.step;
    $("step-now").textContent = run.steps[state.step].toLocaleString("en");
    $("step").setAttribute("aria-valuetext", `step ${run.steps[state.step]}`);
    $("summary").innerHTML =
      `<b>${found.rows.toLocaleString("en")}</b> recorded rows; a larger dot holds more of them. ` +
      `Median angle <b>${round(found.theta / RAD)}°</b>, median probability <b>${draw.short(found.q)}</b>. ` +
      `This effect multiplies their pulls by about <b>${draw.short(found.positive)}</b> ` +
      `and their pushes by <b>${draw.short(found.negative)}</b> on average; ` +
      `${found.repelled ? `<b>${percent(found.repelled)}</b> are repelled` : "none is repelled"}.` +
      (state.tau === run.tau ? "" : ` Their probabilities are those at the run's tau, ${run.tau}.`);
  }

  /* Under the pointer, a map says its weight. */
  for (const side of ["left", "right"])
    $(side).addEventListener("pointermove", event => {
      const {state} = model;
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform($(side).getScreenCTM().inverse());
      const theta = ((point.x - draw.BOX.x) / draw.BOX.w) * PI,
        q = 1 - (point.y - draw.BOX.y) / draw.BOX.h;
      if (state.maps === "gradients" || !(theta > 0 && theta < PI && q > 0 && q < 1)) return;
      const found = lens.multipliers(model.factors(), lens.rowAt(theta, q, state.tau), state.beta);
      const whole = side === "right" ? found.negative : found.positive - (state.maps === "split" ? found.negative : 0);
      $(`${side}-reads`).textContent =
        `At ${round(theta / RAD)}° and q̃ = ${q.toFixed(2)}: × ` +
        `${side === "left" && found.sign < 0 ? "−" : ""}${draw.short(exp(whole))}`;
    });

  return {render, summary, dark};
})();
