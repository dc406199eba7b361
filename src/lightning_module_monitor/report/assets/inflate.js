// Decompression of deflate (RFC 1951). The browser's own cannot be used: it needs an event loop, and printing waits for none.
"use strict";

const LENGTH_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/** First values of codes, of which each has `extra(index)` more bits than its first value says. */
function bases(count, start, extra) {
  const values = [start];
  for (let index = 0; index < count - 1; index++) values.push(values[index] + (1 << extra(index)));
  return values;
}

const extraOfLength = (index) => (index < 4 || index === 28 ? 0 : (index >> 2) - 1);
const extraOfDistance = (index) => (index < 2 ? 0 : (index >> 1) - 1);
const LENGTHS = [...bases(28, 3, extraOfLength), 258];
const DISTANCES = bases(30, 1, extraOfDistance);

/** A Huffman code: numbers of codes by their length, and symbols in the order of codes. */
function codeOf(lengths) {
  const counts = new Uint16Array(16);
  for (const length of lengths) counts[length]++;
  counts[0] = 0;
  const next = new Uint16Array(17);
  for (let length = 1; length < 16; length++) next[length + 1] = next[length] + counts[length];
  const symbols = new Uint16Array(lengths.length);
  lengths.forEach((length, symbol) => {
    if (length) symbols[next[length]++] = symbol;
  });
  return { counts, symbols };
}

const FIXED = [codeOf(Array.from({ length: 288 }, (_, symbol) => (symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8))), codeOf(Array(30).fill(5))];

const DAMAGED = "the numbers of this page are damaged; write it anew";

/** The bits of bytes, from the lowest on. */
class Bits {
  constructor(bytes) {
    this.bytes = bytes;
    this.position = 16; // behind the header of zlib
  }

  take(count) {
    let value = 0;
    for (let index = 0; index < count; index++, this.position++) value |= ((this.bytes[this.position >> 3] >> (this.position & 7)) & 1) << index;
    return value;
  }

  /** The next symbol of a Huffman code. */
  symbol({ counts, symbols }) {
    const { bytes } = this;
    let [code, first, index, position] = [0, 0, 0, this.position];
    this.check();
    for (let length = 1; length < 16; length++, position++) {
      code |= (bytes[position >> 3] >> (position & 7)) & 1;
      if (code - first < counts[length]) {
        this.position = position + 1;
        return symbols[index + code - first];
      }
      index += counts[length];
      first = (first + counts[length]) << 1;
      code <<= 1;
    }
    throw new Error(DAMAGED);
  }

  /** Damaged bytes must not be read for ever. */
  check() {
    if (this.position >= 8 * this.bytes.length) throw new Error(DAMAGED);
  }

  /** The two codes at the begin of a block: of literals and lengths, and of distances. */
  codes() {
    const [literals, distances, count] = [this.take(5) + 257, this.take(5) + 1, this.take(4) + 4];
    const lengths = Array(19).fill(0);
    for (const symbol of LENGTH_ORDER.slice(0, count)) lengths[symbol] = this.take(3);
    const code = codeOf(lengths);
    const all = [];
    while (all.length < literals + distances) {
      const symbol = this.symbol(code);
      if (symbol < 16) all.push(symbol);
      else if (symbol === 16) all.push(...Array(3 + this.take(2)).fill(all.at(-1)));
      else all.push(...Array(symbol === 17 ? 3 + this.take(3) : 11 + this.take(7)).fill(0));
    }
    return [codeOf(all.slice(0, literals)), codeOf(all.slice(literals))];
  }
}

/** The bytes that zlib has compressed. */
function inflate(packed) {
  const bits = new Bits(packed);
  let output = new Uint8Array(8 * packed.length + 1024);
  let size = 0;
  const reserve = (count) => {
    if (size + count <= output.length) return;
    const larger = new Uint8Array(2 * (size + count));
    larger.set(output);
    output = larger;
  };
  for (let isLast = 0; !isLast; ) {
    bits.check();
    isLast = bits.take(1);
    const type = bits.take(2);
    if (type === 0) {
      const start = (bits.position + 7) >> 3;
      const count = packed[start] | (packed[start + 1] << 8);
      reserve(count);
      output.set(packed.subarray(start + 4, start + 4 + count), size);
      size += count;
      bits.position = 8 * (start + 4 + count);
      continue;
    }
    const [literals, distances] = type === 1 ? FIXED : bits.codes();
    for (let symbol = bits.symbol(literals); symbol !== 256; symbol = bits.symbol(literals)) {
      reserve(258);
      if (symbol < 256) {
        output[size++] = symbol;
        continue;
      }
      const index = symbol - 257;
      const length = LENGTHS[index] + bits.take(extraOfLength(index));
      const rank = bits.symbol(distances);
      const distance = DISTANCES[rank] + bits.take(extraOfDistance(rank));
      for (const end = size + length; size < end; size++) output[size] = output[size - distance];
    }
  }
  return output.slice(0, size);
}
