"""From a node's knobs to its shell, which loads torch: seconds, before which it says what it can already see is wrong.

Torch takes its threads from an environment that the knobs decide, so the shell (node/process.py) is imported here, late. Not here:
what only the shell can find, such as sizes that do not fit this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.model_config import read_model_config
from engine.split import check_split
from engine.weight_files import find_weight_files
from node.config import NodeConfig
from node.step_watch import StepHung
from runtime.collecting import loading
from runtime.config import set_grpc_environment, set_thread_environment
from runtime.process import check_writable, die_with_parent, fatal

if TYPE_CHECKING:
    from node.process import CoreMaker
    from node.roles import RoleName


def start_node(role: RoleName, config: NodeConfig, make_cores: Mapping[RoleName, CoreMaker]) -> int:
    """Run the node until a signal, or a step that hangs; its exit code. `make_cores`: of the roles that it can take, `role` too.

    Ends the process with one line and 2 for what the user can mend.
    """
    die_with_parent(config.parent_pid)
    try:
        check_writable("--ready-file", config.ready_file)
        check_split(read_model_config(config.model), config.tp)
        find_weight_files(config.model)
    except ValueError as error:
        fatal(f"baton {role}: {error}")
    set_thread_environment(config.num_threads)
    set_grpc_environment()
    with loading():
        from node.process import run_node

    try:
        return run_node(role, config, make_cores)
    except* StepHung as errors:  # alone, or what ended a group of tasks
        hung = errors.exceptions[0]
    sys.stderr.write(f"baton {role}: {hung}\n")
    return 1
