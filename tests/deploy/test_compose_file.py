"""deploy/compose.yaml and what it mounts: valid for compose v2 by the specification's schema, and it names what is there.

That v1 takes it, and that it works, `make compose-test` shows.
Schema: https://github.com/compose-spec/compose-spec (Apache-2.0), schema/compose-spec.json, as of June 2026.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from decode_node.config import DecodeConfig
