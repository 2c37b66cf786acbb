"use strict";
/* What effects make of a row, as pure functions of the positive's angle theta, its probability q without margins,
   tau, beta and a list of factors. The twin of marginlens/effects.py and marginlens/lens/theory.py: weights are
   logarithms, because factors that would overflow alone cancel. Nothing here touches the page. */
const lens = (() => {
  const {abs, exp, expm1, log, log1p, sin, cos, min, max, sign, PI} = Math;

  const logSigmoid = x => min(x, 0) - log1p(exp(-abs(x)));
  const logAddExp = (x, y) => (x === y ? x + Math.LN2 : max(x, y) + log1p(exp(-abs(x - y))));
  const logOneMinus = (weight, x) => logAddExp(logSigmoid(-x), log(1 - weight) + logSigmoid(x));
  const logit = q => log(q) - log1p(-q);

  /* Eq. 10: log of gamma(x, c). Each form where it keeps its digits. */
  function logGamma(x, c) {
    if (c === Infinity) return 0;
    const y = c * log(x);
    return (y > -Math.LN2 ? log(-expm1(y)) : log1p(-exp(y))) / c;
  }

  /* Eq. 2 and Eq. 4: the positive's logit, without and with margins. */
  const plainLogit = row => row.scale * row.cos;
  const marginLogit = (row, m1, m2) => row.scale * (row.cos * cos(m1) - row.sin * sin(m1) - m2);

  /* Each effect: its parameters with their defaults, and the logarithms of its weights: [on the positive, on the row].
     undefined: a parameter that has no default. */
  const EFFECTS = {
    plain: {defaults: {}, weights: () => [0, 0]},
    margin: {defaults: {m1: 0, m2: 0}, weights: () => [0, 0]},
    emphasis: {
      defaults: {s: 1, c: Infinity},
      weights: (row, {s, c}) => [log(s) + logGamma(min(row.theta / PI, 1), c), 0],
    },
    ratio: {
      defaults: {m1: undefined, scope: "positive"},
      weights: (row, {m1, scope}) => {
        const w = logSigmoid(row.A - marginLogit(row, m1, 0)) - logSigmoid(row.A - plainLogit(row));
        return scope === "row" ? [0, w] : [w, 0];
      },
    },
    attenuation: {
      defaults: {alpha: undefined, kind: "I"},
      weights: (row, {alpha, kind}) => {
        const w = -logOneMinus(alpha, plainLogit(row) - row.A);
        return kind === "I" ? [0, w] : [w, 0];
      },
    },
  };

  /* A row by its angle and probability, or by the angles of its negatives, each of which stands for some copies. */
  const rowAt = (theta, q, tau) => ({
    theta,
    cos: cos(theta),
    sin: sin(theta),
    scale: 1 / tau,
    A: cos(theta) / tau - logit(q),
  });
  function rowOf(theta, negatives, tau, copies = 1) {
    const logits = negatives.map(angle => cos(angle) / tau),
      top = max(...logits);
    const A = top + log(logits.reduce((sum, x) => sum + exp(x - top), 0)) + log(copies);
    return {theta, cos: cos(theta), sin: sin(theta), scale: 1 / tau, A};
  }
  const probability = row => exp(logSigmoid(plainLogit(row) - row.A));

  /* The sum of the factors' log weights, and the margin among them, if any. */
  function combined(factors, row) {
    let positive = 0,
      whole = 0,
      margin = null;
    for (const factor of factors) {
      const [p, w] = EFFECTS[factor.name].weights(row, factor);
      positive += p;
      whole += w;
      if (factor.name === "margin") margin = factor;
    }
    return {positive: positive + whole, negative: whole, margin};
  }

  /* Theorem 4.1 for any effect: what multiplies the plain gradient with respect to the angle.
     positive and negative are logarithms of sizes; sign is that of the positive's multiplier. */
  function multipliers(factors, row, beta) {
    const {positive, negative, margin} = combined(factors, row);
    if (!margin) return {sign: 1, positive, negative};
    const a = plainLogit(row),
      b = marginLogit(row, margin.m1, margin.m2);
    const turn = (row.sin * cos(margin.m1) + row.cos * sin(margin.m1)) / row.sin;
    const kept = logOneMinus(beta, b - row.A) - logOneMinus(beta, a - row.A);
    return {
      sign: sign(turn),
      positive: log(abs(turn)) + kept + positive,
      negative: logSigmoid(row.A - b) - logSigmoid(row.A - a) + negative,
    };
  }

  /* dL/dtheta of the positive, and dL/dA of its negatives, whatever the angle: finite at theta = 0 too. */
  function gradients(factors, row, beta) {
    const {positive, negative, margin} = combined(factors, row);
    const {m1, m2} = margin || {m1: 0, m2: 0};
    const b = margin ? marginLogit(row, m1, m2) : plainLogit(row);
    const turn = margin ? row.sin * cos(m1) + row.cos * sin(m1) : row.sin;
    const size = log(abs(turn)) + log(row.scale) + logOneMinus(beta, b - row.A) + positive;
    return {positive: sign(turn) * exp(size), negative: beta * exp(logSigmoid(row.A - b) + negative)};
  }

  /* dL/dtheta of a positive and of each negative. A descent step moves against it: negatives are pushed away. */
  function forces(factors, theta, negatives, tau, beta, copies = 1) {
    const row = rowOf(theta, negatives, tau, copies),
      found = gradients(factors, row, beta);
    const shares = negatives.map(angle => copies * exp(cos(angle) / tau - row.A));
    return {
      q: probability(row),
      positive: found.positive,
      negatives: negatives.map((angle, j) => (-found.negative * shares[j] * sin(angle)) / tau),
      shares,
    };
  }

  /* Eq. 3, Fig. 1: the size of a plain gradient, of a positive, and of a negative with probability q. */
  const plainNegative = (theta, q, tau, beta) => (beta * q * sin(theta)) / tau;

  /* The angle beyond which a margin repels its positive: theta + m1 > pi. */
  function repelledFrom(factors) {
    const margin = factors.find(factor => factor.name === "margin");
    return margin && margin.m1 > 0 ? PI - margin.m1 : Infinity;
  }

  /* A number as the string form of an effect has it: 0.4, 1/3, -1e-3, inf. */
  function number(text) {
    const plain = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i,
      parts = text.split("/").map(part => part.trim());
    if (/^-?inf$/.test(text)) return text[0] === "-" ? -Infinity : Infinity;
    if (parts.length > 2 || !parts.every(part => plain.test(part))) return NaN;
    return parts.length === 2 ? Number(parts[0]) / Number(parts[1]) : Number(parts[0]);
  }

  /* "margin(m1=0.4) * emphasis(s=20)" as a list of factors. Throws an Error that says what is wrong. */
  function parse(text) {
    return text.split("*").map(part => {
      const found = /^\s*([a-z_]\w*)\s*(?:\(([^()]*)\))?\s*$/i.exec(part);
      if (!found) throw new Error(`"${part.trim()}" does not read as name(key=value, ...)`);
      const name = found[1].toLowerCase();
      if (!Object.hasOwn(EFFECTS, name)) throw new Error(`${name} is not on this page yet`);
      const {defaults} = EFFECTS[name],
        factor = {name, ...defaults};
      for (const pair of (found[2] || "")
        .split(",")
        .map(x => x.trim())
        .filter(Boolean)) {
        const [key, value = ""] = pair.split("=").map(x => x.trim().replace(/^(["'])(.*)\1$/, "$2"));
        if (!Object.hasOwn(defaults, key)) throw new Error(`${name} has no parameter ${key}`);
        factor[key] = typeof defaults[key] === "string" ? value : number(value);
        if (Number.isNaN(factor[key])) throw new Error(`${name}'s ${key} must be a number, not ${value}`);
      }
      for (const key in factor) if (factor[key] === undefined) throw new Error(`${name} needs ${key}`);
      return factor;
    });
  }

  /* The string form that Python reads back; parameters at their default are left out. */
  function spell(factors) {
    const shown = value => (value === Infinity ? "inf" : String(value));
    const words = factors.map(({name, ...given}) => {
      const odd = Object.keys(given).filter(key => given[key] !== EFFECTS[name].defaults[key]);
      return odd.length ? `${name}(${odd.map(key => `${key}=${shown(given[key])}`).join(", ")})` : name;
    });
    return words.join(" * ") || "plain";
  }

  /* The median of a histogram, within its bin. */
  function median(edges, counts) {
    const half = counts.reduce((sum, x) => sum + x, 0) / 2;
    let below = 0;
    for (let i = 0; i < counts.length; i++) {
      if (counts[i] && below + counts[i] >= half)
        return edges[i] + ((edges[i + 1] - edges[i]) * (half - below)) / counts[i];
      below += counts[i];
    }
    return NaN;
  }

  /* What an effect would do to recorded rows, each taken to be at the centre of its bin. */
  function summary({theta, q, counts}, factors, tau, beta) {
    const centre = (edges, i) => (edges[i] + edges[i + 1]) / 2,
      border = repelledFrom(factors);
    let rows = 0,
      positive = 0,
      negative = 0,
      repelled = 0;
    const angles = theta.slice(1).map(() => 0),
      shares = q.slice(1).map(() => 0);
    counts.forEach((line, i) =>
      line.forEach((count, j) => {
        if (!count) return;
        const found = multipliers(factors, rowAt(centre(theta, i), centre(q, j), tau), beta);
        rows += count;
        angles[i] += count;
        shares[j] += count;
        positive += count * found.sign * exp(found.positive);
        negative += count * exp(found.negative);
        if (centre(theta, i) > border) repelled += count;
      }),
    );
    return {
      rows,
      angles,
      theta: median(theta, angles),
      q: median(q, shares),
      positive: positive / rows,
      negative: negative / rows,
      repelled: repelled / rows,
    };
  }

  return {
    EFFECTS,
    rowAt,
    rowOf,
    probability,
    multipliers,
    gradients,
    forces,
    plainNegative,
    repelledFrom,
    parse,
    spell,
    summary,
  };
})();
