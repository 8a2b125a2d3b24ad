"""Every mutant, in the order in which `make mutants` plants them."""

from __future__ import annotations

from typing import Final

from tests.mutants import (
    of_answers,
    of_caches,
    of_chart,
    of_engine,
    of_fetching,
    of_handoff,
    of_int8,
    of_kernels,
    of_kv_pool,
    of_mixed,
    of_moves,
    of_nodes,
    of_one_sided,
    of_placement,
    of_pressure,
    of_ranks,
    of_registry,
    of_retry,
    of_roles,
    of_router,
    of_runner,
    of_saving,
    of_security,
    of_session,
    of_sight,
)
from tests.mutants.mutant import Mutant

ALL: Final[tuple[Mutant, ...]] = (
    *of_handoff.MUTANTS,
    *of_nodes.MUTANTS,
    *of_mixed.MUTANTS,
    *of_engine.MUTANTS,
    *of_pressure.MUTANTS,
    *of_router.MUTANTS,
    *of_answers.MUTANTS,
    *of_caches.MUTANTS,
    *of_chart.MUTANTS,
    *of_fetching.MUTANTS,
    *of_int8.MUTANTS,
    *of_kernels.MUTANTS,
    *of_kv_pool.MUTANTS,
    *of_moves.MUTANTS,
    *of_one_sided.MUTANTS,
    *of_placement.MUTANTS,
    *of_ranks.MUTANTS,
    *of_registry.MUTANTS,
    *of_retry.MUTANTS,
    *of_roles.MUTANTS,
    *of_runner.MUTANTS,
    *of_saving.MUTANTS,
    *of_security.MUTANTS,
    *of_session.MUTANTS,
    *of_sight.MUTANTS,
)
