"""Make a model directory with random weights, in exactly the layout that Hugging Face uses.

For demos, tests and measurements: loaded like a real one, by Baton and by transformers. Same arguments, same bytes.

    baton model make --like llama-tiny --dtype fp32 --seed 0 --out DIR
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from engine.byte_tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, MESSAGE_END, write_json, write_tokenizer
from engine.config_values import ModelError
from engine.model_config import DTYPES, read_model_config
from engine.model_sizes import SIZES, ModelSize, config_json
from engine.tensor_names import tensor_shapes
from engine.weight_files import SINGLE_FILE

_REPORTED_NUMBERS: Final = 50_000_000  # weights; a smaller model is made before anybody wonders


def make_model(
    size: ModelSize, dtype: str, seed: int, out: Path, report: Callable[[str], None] = lambda line: None
) -> None:
    """Write the directory for dtype "fp32", "bf16" or "fp16"; `report` gets a line now and then for a large one.

    Raises ModelError if it exists and is not empty. Who is interrupted leaves it empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty directory")
    out.mkdir(parents=True, exist_ok=True)
    is_whole = False
    try:
        _write_model(size, dtype, seed, out, report)
        is_whole = True
    finally:
        for half in () if is_whole else [*out.iterdir()]:
            half.unlink()


def _write_model(size: ModelSize, dtype: str, seed: int, out: Path, report: Callable[[str], None]) -> None:
    from safetensors.torch import save  # torch is heavy: a wrong flag is told before it is loaded

    from engine.kv_memory import TORCH_DTYPES
    from engine.random_weights import draw_weights

    write_json(out / "config.json", config_json(size, dtype))
    write_json(
        out / "generation_config.json",
        {"bos_token_id": BEGIN_OF_TEXT, "eos_token_id": [END_OF_TEXT, MESSAGE_END]},
    )
    write_tokenizer(size.vocab_size, size.max_position_embeddings, out)
    config = read_model_config(out)
    num_numbers = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    weights = draw_weights(config, TORCH_DTYPES[dtype], seed, _progress(num_numbers, report))
    # Not save_file: it makes files that only their owner can read, and a container may run as somebody else.
    data = save(weights, metadata={"format": "pt"})
    if num_numbers >= _REPORTED_NUMBERS:
        report(f"writing {len(data) / 1e6:.0f} MB")
    (out / SINGLE_FILE).write_bytes(data)


def _progress(num_numbers: int, report: Callable[[str], None]) -> Callable[[int], None]:
    """A line per tenth of the weights, if they are many."""
    done = tenths = 0

    def drawn(count: int) -> None:
        nonlocal done, tenths
        done += count
        if num_numbers >= _REPORTED_NUMBERS and 10 * done // num_numbers > tenths:
            tenths = 10 * done // num_numbers
            report(f"{10 * tenths} % of {num_numbers / 1e6:.0f} million weights are drawn")

    return drawn


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 63):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 - 1, not {text!r}")
    return int(text)


def main(argv: list[str]) -> int:
    """Run the command; exit code 2 and one line for what cannot be done."""
    parser = _OneLineParser("baton model make", description="Make a random-weight model directory.")
    parser.add_argument("--like", choices=tuple(SIZES), default="llama-tiny", help="which sizes (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the stored weights (default: fp32, of a real model's shape bf16, as there)"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory to make; must not exist or be empty")
    arguments = parser.parse_args(argv)
    size = SIZES[arguments.like]
    try:
        make_model(size, arguments.dtype or size.stored_dtype, arguments.seed, arguments.out, _say)
    except ModelError as error:
        _say(str(error))
        return 2
    except OSError as error:
        _say(f"--out {arguments.out}: cannot be written: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        _say(f"interrupted; nothing is left in {arguments.out}")
        return 130
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"baton model make: {line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
