"""Where one rank's rows live between runs: host stores, pools on the device, and row policies.

A run sees them through `ShardedTables` or `DeviceTables`, made here for its plan. A pool may hold
rows that are newer than those of its store: `flush` writes them back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Mesh
from nestpipe.embedding.device_tables import DeviceTables
from nestpipe.embedding.lifecycle import AdmittedRows, Lifecycle, RowLifecycle
from nestpipe.embedding.optimizers import RowOptimizer, row_optimizer
from nestpipe.embedding.pool import RowPool, free_memory, pool_sizes, pools_on_one_device
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.embedding.store import RowStore, SsdOptions, open_store, ssd_options
from nestpipe.embedding.store.protocol import ReadOnlyRows
from nestpipe.embedding.table_groups import TableGroup
from nestpipe.errors import ConfigError
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.segments import COMM_DTYPES
from nestpipe.schedule import Merge, Plan, Retrieval
from nestpipe.train.background import TrackedStore
from nestpipe.train.checkpoint import put_rows
from nestpipe.train.config import TrainSettings


class TableStorage:
    """This rank's shard of all tables, group by group, as long as its trainer lives."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        settings: TrainSettings,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        """Opens the stores; pools are opened by the first run that needs them."""
        self.groups = list(groups)
        self.settings = settings
        self.mesh = mesh
        self.device = device
        self.optimizer = _row_optimizer(settings, groups)
        self.pools: list[RowPool] = []
        self.tracked = [TrackedStore(store) for store in self._open_stores()]
        """The stores, without what is in the pools alone."""
        self.lifecycle = self._open_lifecycle()
        """What is known of rows whose tables have a policy; None: no table has one."""

    def _open_stores(self) -> list[RowStore]:
        settings, shards = self.settings, self.mesh.shards.size
        layouts = [
            group.layout(self.optimizer, seed=settings.seed, ranks=shards) for group in self.groups
        ]
        ssd: Sequence[SsdOptions | None] = [None] * len(layouts)
        if settings.store == "ssd":
            sharing = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.mesh.world.size)))
            ssd = ssd_options(settings.store_path, settings.host_memory, layouts, sharing)
        threads = settings.store_threads or None
        native = settings.native and native_wanted()
        return [
            open_store(layout, native=native, threads=threads, ssd=options)
            for layout, options in zip(layouts, ssd, strict=True)
        ]

    def _open_lifecycle(self) -> Lifecycle | None:
        """Only for tables with a policy."""
        settings = self.settings
        of_groups = [
            RowLifecycle(
                group,
                store,
                group.max_rows(self.optimizer),
                self.mesh.shards,
                native=settings.native and native_wanted(),
                threads=settings.store_threads or None,
            )
            if any(table.has_lifecycle for table in group.tables)
            else None
            for group, store in zip(self.groups, self.tracked, strict=True)
        ]
        if not any(of_groups):
            return None
        parallel = settings.parallel
        if parallel.groups > 1 and parallel.merge is not Merge.EXACT:
            raise ConfigError(
                f"parallel.merge is {str(parallel.merge)!r} and a table has a row policy, which "
                "needs all groups to see the same keys; set parallel.merge = 'exact'"
            )
        return Lifecycle(of_groups, settings.lifecycle_every)

    def _open_pools(self) -> list[RowPool]:
        stores = self.training_stores
        layouts = [store.layout for store in stores]
        sharing = pools_on_one_device(self.device, self.mesh.world.size)
        sizes = pool_sizes(self.settings.device_memory, layouts, self.device, sharing)
        return [
            RowPool(store, slots, self.device, pin=self.settings.pin_rows)
            for store, slots in zip(stores, sizes, strict=True)
        ]

    # The tables as a run sees them.

    def for_training(self, plan: Plan, *, by_device: bool) -> ShardedTables | DeviceTables:
        """The tables for ops of that plan; `by_device`: the device routes their keys."""
        if plan.shape.retrieval is not Retrieval.POOLED:
            return self._sharded(plan, self.training_stores, training=True)
        self.pools = self.pools or self._open_pools()
        for pool in self.pools:
            pool.begin_run(plan.shape.buffers)
        if not by_device:
            return self._sharded(plan, self.training_stores, training=True)
        return DeviceTables(
            self.groups,
            self.pools,
            self.optimizer,
            self.mesh.shards,
            plan.shape,
            self.device,
            COMM_DTYPES[self.settings.pipeline.comm_dtype],
        )

    def for_reading(self, plan: Plan) -> ShardedTables:
        """The tables for ops that only read; they never insert rows."""
        return self._sharded(plan, self.stores, training=False)

    def _sharded(self, plan: Plan, stores: Sequence[RowStore], *, training: bool) -> ShardedTables:
        return ShardedTables(
            self.groups,
            stores,
            self.optimizer,
            self.mesh,
            plan.shape,
            self.device,
            in_place=training and self.settings.in_place,
            pin=training and self.settings.pin_rows,
            comm_dtype=COMM_DTYPES[self.settings.pipeline.comm_dtype],
            pools=self.pools if training else (),
            lifecycle=self.lifecycle if training else None,
        )

    @property
    def stores(self) -> list[RowStore]:
        """The host stores, one for each group of tables, with all rows as they are now."""
        self.flush()
        return list(self.tracked)

    @property
    def training_stores(self) -> list[RowStore]:
        """The host stores as training sees them.

        It cannot write to those of frozen tables, and rows of some keys are not stored.
        """
        policies = self.lifecycle.of_groups if self.lifecycle is not None else []
        seen: list[RowStore] = []
        for g, (group, store) in enumerate(zip(self.groups, self.tracked, strict=True)):
            policy = policies[g] if policies else None
            if policy is not None and policy.selects:
                seen.append(AdmittedRows(store, policy))
            else:
                seen.append(store if group.trainable else ReadOnlyRows(store))
        return seen

    # Pools in front of the stores.

    def flush(self) -> None:
        """Write rows that are newer in a pool to their store."""
        for pool in self.pools:
            pool.flush()

    def clear_pools(self) -> None:
        """Empty the pools: rows were changed in the stores."""
        for pool in self.pools:
            pool.clear()

    def close_pools(self) -> None:
        """Write everything back and give the device memory up."""
        self.flush()
        self.pools = []

    def pool_slots(self) -> tuple[int, int]:
        """Slots of the pools that are taken, as the host last heard, and all of them."""
        slots = sum(pool.num_slots for pool in self.pools)
        return slots - sum(pool.free_known for pool in self.pools), slots

    def pool_memory(self) -> tuple[float, float]:
        """Bytes of the pools, and what they could have if they took all that is free."""
        mine = sum(pool.num_bytes() for pool in self.pools)
        sharing = pools_on_one_device(self.device, self.mesh.world.size)
        return mine, mine + free_memory(self.device) / sharing

    # Rows between runs.

    def row_counts(self) -> dict[str, int]:
        """Rows of each table in this rank's store; those in a pool alone do not count."""
        return {
            table.name: count
            for group, store in zip(self.groups, self.tracked, strict=True)
            for table, count in zip(group.tables, store.num_rows(), strict=True)
        }

    def track(self, *, on: bool) -> None:
        """Note which rows are written from now on, for the next checkpoint; or no longer."""
        self.flush()  # what pools hold was written before
        for store in self.tracked:
            store.track(on=on)

    def sweep(self, step: int) -> dict[str, Tensor]:
        """Apply the row policies; returns this rank's keys by table whose rows have left."""
        assert self.lifecycle is not None
        self.flush()
        evicted = self.lifecycle.sweep(step)
        keys = {of.table: of.keys for of in evicted}
        for group, pool in zip(self.groups, self.pools, strict=False):  # only with `pooled`
            for number, table in enumerate(group.tables):
                pool.forget_rows(number, keys.get(table.name, torch.empty(0, dtype=torch.int64)))
        return keys

    def merge_rest(self, tables: ShardedTables | DeviceTables) -> None:
        """After a run: merge the replicas of rows that its last batches touched."""
        if tables.merge_is_due:
            self.flush()
            tables.merge_rest(self.training_stores)
            self.clear_pools()

    def rows_of(self, table: str, keys: Tensor) -> Tensor:
        """Weights of some rows, the same on every rank; for looking, not for training."""
        keys = torch.as_tensor(keys)
        if keys.dtype != torch.int64 or keys.ndim != 1:
            raise ConfigError(
                f"the keys of {table!r} are {str(keys.dtype).removeprefix('torch.')} of shape "
                f"{tuple(keys.shape)}; give int64 in one dimension"
            )
        g, number = self._find(table)
        group, store, shards = self.groups[g], self.stores[g], self.mesh.shards
        counts = [0] * len(group.tables)
        counts[number] = len(keys)
        rows = torch.empty(len(keys), store.layout.width)
        store.gather(keys.contiguous(), counts, rows)
        mine = owner_of(keys, number, shards.size, group.table_owners[number]) == shards.rank
        weights = torch.where(mine[:, None], rows[:, : group.dim], 0.0).contiguous()
        weights = weights.to(self.device)
        shards.all_reduce(weights)
        return weights.cpu()

    def put_rows(
        self, table: str, keys: Tensor, weights: Tensor, state: Tensor | None, step: int
    ) -> None:
        """Insert or replace the rows that this rank owns; without state they begin afresh."""
        g, number = self._find(table)
        self.flush()
        shards, store = self.mesh.shards, self.tracked[g]
        mine = put_rows(self.groups[g], number, store, shards, keys, weights, state)
        policy = self.lifecycle.of_groups[g] if self.lifecycle is not None else None
        if policy is not None:
            policy.put(number, mine, step)
        self.clear_pools()

    def _find(self, table: str) -> tuple[int, int]:
        """The group of a table, and the table's number there."""
        for g, group in enumerate(self.groups):
            for number, declared in enumerate(group.tables):
                if declared.name == table:
                    return g, number
        raise ConfigError(f"there is no table {table!r}; the tables are {self.table_names}")

    @property
    def table_names(self) -> list[str]:
        return [table.name for group in self.groups for table in group.tables]

    def close(self) -> None:
        """Give the rows' memory back."""
        self.pools = []
        if self.lifecycle is not None:
            self.lifecycle.close()
        for store in self.tracked:
            store.close()


def _row_optimizer(settings: TrainSettings, groups: Sequence[TableGroup]) -> RowOptimizer:
    """How rows move; a table whose rate would take all of a weight is refused."""
    rows, parallel = settings.rows, settings.parallel
    scale = rows.scale or float(parallel.groups if parallel.merge == "averaged" else 1)
    made = row_optimizer(
        *(rows.optimizer, rows.lr, rows.eps, scale),
        betas=(rows.betas[0], rows.betas[1]),
        weight_decay=rows.weight_decay,
        schedule=rows.factor,
    )
    for group in groups:
        _refuse_whole_decay(group.tuned(made), group)
    return made


def _refuse_whole_decay(optimizer: RowOptimizer, group: TableGroup) -> None:
    if optimizer.lr * optimizer.weight_decay >= 1:
        raise ConfigError(
            f"rows.weight_decay is {optimizer.weight_decay} and the rate of table "
            f"{group.tables[0].name!r} {optimizer.lr}: a step would take all of a weight; lower one"
        )
