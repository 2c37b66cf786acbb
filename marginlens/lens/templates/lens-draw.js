/* Pictures from numbers: colours, the circle's arcs, maps and curves as SVG. Nothing here holds state. */
const draw = (() => {
  const {abs, exp, log, log10, log1p, max, min, PI, round} = Math;
  const BOX = {x: 44, y: 10, w: 298, h: 236},
    COLUMNS = 96,
    ROWS = 64;
  const THEMES = {
    light: ["#08407a", "#5a9bd4", "#f6f4ee", "#f0a352", "#8f3d00"],
    dark: ["#9ccbff", "#2f77b8", "#20252b", "#b5651d", "#ffc183"],
    size: ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"], // cividis: safe for the colour-blind
  };
  const palettes = Object.fromEntries(Object.entries(THEMES).map(([name, stops]) => [name, table(stops)]));

  /* 256 colours between stops. */
  function table(stops) {
    const parts = stops.map(hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)));
    return Array.from({length: 256}, (_, i) => {
      const at = (i / 255) * (parts.length - 1),
        k = min(parts.length - 2, at | 0);
      return parts[k].map((value, j) => round(value + (parts[k + 1][j] - value) * (at - k)));
    });
  }

  /* 0.0123 -> "0.012"; three digits are enough for a picture. */
  function short(x) {
    const size = abs(x),
      sign = x < 0 ? "−" : "";
    if (size === 0 || Number.isNaN(x)) return size === 0 ? "0" : "?";
    if (size === Infinity) return `${sign}∞`;
    if (size >= 1e4 || size < 1e-4) {
      return sign + size.toExponential(1).replace("e+", "e").replace("e-", "e−");
    }
    return sign + (size >= 100 ? round(size) : Number(size.toPrecision(size < 0.1 ? 2 : 3)));
  }

  /* A limit of an axis: 30, or a power of ten. */
  const superscript = power => [...String(power)].map(digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  const tick = x => (x > 999 ? `10${superscript(round(log10(x)))}` : short(x));

  /* A point of the circle, and an arc between two signed angles, in radians from the top. */
  const at = (angle, r) => [r * Math.sin(angle), -r * Math.cos(angle)];
  const xy = ([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`;
  function arc(from, to, r, move = "M") {
    const large = abs(to - from) > PI ? 1 : 0;
    return `${move}${xy(at(from, r))}A${r} ${r} 0 ${large} ${to > from ? 1 : 0} ${xy(at(to, r))}`;
  }

  /* An arrow along the circle: its line, and its tip. */
  function arrow(angle, length, r, width) {
    if (abs(length) < 7) return {line: "", tip: ""};
    width *= min(1, abs(length) / 18);
    const end = angle + length / r,
      head = min(abs(length) * 0.6, width * 1.9) * Math.sign(length);
    const base = end - head / r,
      tip = [at(base, r - width), at(base, r + width), at(end, r)];
    return {line: arc(angle, base, r), tip: `M${tip.map(xy).join("L")}Z`};
  }
  const reach = gradient => 44 * log10(1 + 10 * abs(gradient));

  /* A colour that the theme mixes: orange for more than plain, blue for less. */
  function ink(logWeight) {
    const share = min(1, abs(logWeight) / log(10)) ** 0.45 * 100;
    return `color-mix(in oklab, var(--${logWeight > 0 ? "strong" : "weak"}) ${share.toFixed(0)}%, var(--even))`;
  }

  /* The smallest round limit that nearly all of these sizes stay below. */
  function limit(values, choices) {
    const sizes = Float64Array.from(values.filter(Number.isFinite), abs).sort();
    const most = sizes.length ? sizes[min(sizes.length - 1, (sizes.length * 0.95) | 0)] : 0;
    return choices.find(choice => most <= choice * (1 + 1e-9)) || choices.at(-1);
  }

  /* Values over the centres of a grid of angles (columns) and probabilities (rows, from the bottom). */
  function grid(value) {
    const found = new Float64Array(COLUMNS * ROWS);
    for (let j = 0; j < ROWS; j++)
      for (let i = 0; i < COLUMNS; i++) found[j * COLUMNS + i] = value((PI * (i + 0.5)) / COLUMNS, (j + 0.5) / ROWS);
    return found;
  }

  const canvas = document.createElement("canvas");
  /* An image of a grid; level maps a value to [0, 1]. */
  function image(values, palette, level) {
    canvas.width = COLUMNS;
    canvas.height = ROWS;
    const context = canvas.getContext("2d"),
      pixels = context.createImageData(COLUMNS, ROWS);
    for (let j = 0; j < ROWS; j++)
      for (let i = 0; i < COLUMNS; i++) {
        const share = level(values[j * COLUMNS + i]),
          place = 4 * ((ROWS - 1 - j) * COLUMNS + i);
        const colour = palettes[palette][round(255 * max(0, min(1, share || 0)))];
        for (let k = 0; k < 3; k++) pixels.data[place + k] = colour[k];
        pixels.data[place + 3] = 255;
      }
    context.putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }

  const px = theta => BOX.x + (BOX.w * theta) / PI,
    py = share => BOX.y + BOX.h * (1 - share);

  /* Marching squares: the line where a grid's value is 0. */
  function contour(values) {
    let path = "";
    const place = (i, j) => [BOX.x + (BOX.w * (i + 0.5)) / COLUMNS, BOX.y + BOX.h * (1 - (j + 0.5) / ROWS)];
    for (let j = 0; j + 1 < ROWS; j++)
      for (let i = 0; i + 1 < COLUMNS; i++) {
        const corners = [
            [i, j],
            [i + 1, j],
            [i + 1, j + 1],
            [i, j + 1],
          ],
          cuts = [];
        corners.forEach(([ci, cj], k) => {
          const [di, dj] = corners[(k + 1) % 4],
            a = values[cj * COLUMNS + ci],
            b = values[dj * COLUMNS + di];
          if (a > 0 === b > 0 || !Number.isFinite(a - b)) return;
          const share = a / (a - b),
            [x0, y0] = place(ci, cj),
            [x1, y1] = place(di, dj);
          cuts.push(`${(x0 + (x1 - x0) * share).toFixed(1)} ${(y0 + (y1 - y0) * share).toFixed(1)}`);
        });
        for (let k = 0; k + 1 < cuts.length; k += 2) path += `M${cuts[k]}L${cuts[k + 1]}`;
      }
    return path;
  }

  /* The frame of a chart over the angle: ticks below, given ticks at the left. */
  function frame(yLabel, ticks, x = "θ, the positive's angle") {
    const {x: left, y: top, w, h} = BOX;
    const below = [0, 45, 90, 135, 180].map(degrees => {
      const at = px((degrees * PI) / 180);
      return (
        `<path class="axis" d="M${at} ${top + h}v4"/>` +
        `<text class="mid soft" x="${at}" y="${top + h + 17}">${degrees}°</text>`
      );
    });
    const beside = ticks.map(([share, text]) => {
      const y = py(share);
      return (
        `<path class="axis" d="M${left} ${y}h-4"/>` +
        `<text class="end soft" x="${left - 6}" y="${y + 4}">${text}</text>`
      );
    });
    return (
      `<rect class="axis" x="${left}" y="${top}" width="${w}" height="${h}"/>${below.join("")}${beside.join("")}` +
      `<text class="mid soft" x="${left + w / 2}" y="${top + h + 38}">${x}</text>` +
      `<text class="mid soft" transform="translate(11 ${top + h / 2}) rotate(-90)">${yLabel}</text>`
    );
  }

  /* Where a margin repels: hatched, from an angle on. */
  function hatched(border) {
    if (!(border < PI)) return "";
    const x = px(border),
      wide = BOX.x + BOX.w - x;
    const word =
      wide > 66
        ? `<text class="mid halo" x="${x + wide / 2}" y="${BOX.y + 16}">repelled</text>`
        : `<text class="end halo" x="${x - 4}" y="${BOX.y + 16}">repelled →</text>`;
    return (
      `<rect fill="url(#hatch)" x="${x}" y="${BOX.y}" width="${wide}" height="${BOX.h}"/>` +
      `<path class="border" d="M${x} ${BOX.y}v${BOX.h}"/>${word}`
    );
  }

  /* A bubble for each bin of recorded rows; its area grows with the rows in it. */
  function bubbles({theta, q, counts}) {
    const most = max(...counts.map(line => max(...line)));
    return counts
      .map((line, i) =>
        line
          .map((count, j) => {
            if (!count) return "";
            const r = max(0.7, 7 * Math.sqrt(count / most));
            return (
              `<circle class="rows" cx="${px((theta[i] + theta[i + 1]) / 2).toFixed(1)}" ` +
              `cy="${py((q[j] + q[j + 1]) / 2).toFixed(1)}" r="${r.toFixed(1)}"/>`
            );
          })
          .join(""),
      )
      .join("");
  }

  /* A line over the angle; values are heights in [0, 1], cut at the frame. */
  function line(values, kind) {
    let path = "",
      drawn = false;
    values.forEach((share, i) => {
      const inside = share >= 0 && share <= 1;
      if (inside)
        path += `${drawn ? "L" : "M"}${px((PI * (i + 0.5)) / values.length).toFixed(1)} ${py(share).toFixed(1)}`;
      drawn = inside;
    });
    return path && `<path class="line ${kind}" d="${path}"/>`;
  }

  /* Grey bars for the angles of recorded rows. */
  function histogram(edges, counts) {
    const most = max(...counts);
    return counts
      .map((count, i) => {
        const h = (BOX.h * 0.45 * count) / most,
          x = px(edges[i]);
        return (
          `<rect class="hist" x="${x.toFixed(1)}" y="${(BOX.y + BOX.h - h).toFixed(1)}" ` +
          `width="${(px(edges[i + 1]) - x).toFixed(1)}" height="${h.toFixed(1)}"/>`
        );
      })
      .join("");
  }

  return {
    BOX,
    COLUMNS,
    palettes,
    short,
    tick,
    at,
    arc,
    arrow,
    reach,
    ink,
    limit,
    grid,
    image,
    px,
    py,
    contour,
    frame,
    hatched,
    bubbles,
    line,
    histogram,
  };
})();
