"""How the tests are shared among processes: by file, and by folder where a folder's tests share clusters.

In runs without slow tests one process has all clusters, one after the other, and the others the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

from support.cluster_folders import CLUSTER_FOLDERS, folder_of

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class FolderScheduling(LoadScopeScheduling):
    """One file's tests, or those of a folder with clusters, in one process, also after a process has died.

    xdist queues all scopes of a dead process again, also those that are done. A process that is given one of
    those, and no other, has nothing to complete, so it is given nothing more, and the run never ends.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder = folder_of(nodeid)
        if folder not in CLUSTER_FOLDERS:
            return nodeid.partition("::")[0]
        # The slow ones take longer than all the rest.
        return "clusters" if "not slow" in self.config.option.markexpr else folder

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ran when the process died has failed: the next process does not run it again."""
        for tests in self.assigned_work[node].values():
            for name, done in tests.items():
                if not done:
                    tests[name] = True
                    super().remove_node(node)
                    return name
        return super().remove_node(node)
