"""The nodes of all namespaces and the edits that keep them consistent: link, unlink, split, grow, trim.

Every edit keeps: a copy implies its parent's; a copy's `keys` name the children that worker holds; nodes nobody holds
are gone; counters are right. Leaves to the tree when to edit, and leases.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from services.scheduler.eviction import WorkerCache
from services.scheduler.node import TOKEN_BYTES, Copy, Node

# Growing, splitting and trimming copy a node's tokens: its length bounds what they cost.
MAX_NODE_TOKENS = 4096


class NodeStore:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.max_node_pages = max(1, MAX_NODE_TOKENS // page_size)
        self.roots: dict[bytes, Node] = {}  # by namespace, which is the root's key
        self.caches: dict[str, WorkerCache] = {}
        self.version = 0  # grows with every edit
        self.num_nodes = 0  # without roots

    def root_copy(self, namespace: bytes, cache: WorkerCache) -> Copy:
        """The worker's copy of the namespace's root, made where it is missing: the place of leases without pages."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", namespace, None)
        copy = root.copies.get(cache.worker)
        if copy is None:
            copy = root.copies[cache.worker] = Copy(root, array("i"), 0)
        return copy

    def prune_root(self, root: Node, worker: str) -> None:
        """Forget the root's copy, and the root, where nothing is below and nobody is there."""
        copy = root.copies[worker]
        if copy.keys or copy.lock_ref:
            return
        del root.copies[worker]
        if not root.copies:
            del self.roots[root.key]

    def link(self, parent: Node, tokens: bytes, copy: Copy, cache: WorkerCache) -> Node:
        """Put `copy` at the child of `parent` with exactly `tokens` (made where missing). The parent has a copy."""
        key = tokens[: self.page_bytes]
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(tokens, key, parent)
            self.num_nodes += 1
        node.copies[cache.worker] = copy
        copy.node = node
        parent.copies[cache.worker].add_key(node.key)
        cache.added(copy, len(copy.pages))
        self.version += 1
        return node

    def unlink(self, copy: Copy, cache: WorkerCache) -> array[int]:
        """Take a copy without children out of the tree; returns its pages."""
        node = copy.node
        parent = node.parent
        assert parent is not None, "a root is never unlinked"
        pages = cache.removed(copy)
        del node.copies[cache.worker]
        above = parent.copies[cache.worker]
        above.remove_key(node.key)
        if not node.copies:
            del parent.children[node.key]
            node.parent = None
            self.num_nodes -= 1
        if parent.parent is None:
            self.prune_root(parent, cache.worker)
        else:
            cache.offer(above)
        self.version += 1
        return pages

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut off the first `num_pages` pages as a new parent, which is returned.

        `node` stays the lower part, so leases at its end need no change; its Copy objects go up with the first
        page, so pins on that need none either.
        """
        parent = node.parent
        assert parent is not None, "a root is never split"
        cut = num_pages * self.page_bytes
        upper = Node(node.tokens[:cut], node.key, parent)
        parent.children[node.key] = upper
        node.tokens = node.tokens[cut:]
        node.key = node.tokens[: self.page_bytes]
        node.parent = upper
        upper.children[node.key] = node
        upper.copies, node.copies = node.copies, {}
        for worker, copy in upper.copies.items():
            node.copies[worker] = self._split_copy(copy, upper, node, num_pages)
            self.caches[worker].offer(node.copies[worker])
        self.num_nodes += 1
        self.version += 1
        return upper

    def _split_copy(self, copy: Copy, upper: Node, node: Node, num_pages: int) -> Copy:
        lower = Copy(node, copy.pages[num_pages:], copy.last_used, copy.ready_step)
        lower.lock_ref = copy.lock_ref
        lower.keys = copy.keys
        del copy.pages[num_pages:]
        copy.node = upper
        copy.keys = [node.key]
        return lower

    def room(self, copy: Copy) -> int:
        """Pages that may be appended to the node itself: a leaf which one lease and no other worker holds."""
        node = copy.node
        if node.parent is None or node.children or len(node.copies) > 1 or copy.lock_ref != 1:
            return 0
        return max(0, self.max_node_pages - len(copy.pages))

    def grow(self, copy: Copy, tokens: bytes, pages: array[int], cache: WorkerCache) -> None:
        copy.node.tokens += tokens
        copy.pages += pages
        cache.added(copy, len(pages))
        self.version += 1

    def trim(self, copy: Copy, num_pages: int, cache: WorkerCache) -> array[int]:
        """Take the last `num_pages` pages of an unlocked leaf; returns them."""
        node = copy.node
        keep = len(copy.pages) - num_pages
        if not keep:
            return self.unlink(copy, cache)
        if len(node.copies) > 1:
            self.split(node, keep)
            return self.unlink(node.copies[cache.worker], cache)
        node.tokens = node.tokens[: keep * self.page_bytes]
        self.version += 1
        return cache.trimmed(copy, keep)

    def free_redundant(self, parent: Node, key: bytes, cache: WorkerCache) -> None:
        """Give back the partial leaves below `parent` whose tokens the page `key` starts with."""
        if not parent.copies[cache.worker].keys:
            return
        for length in range(TOKEN_BYTES, min(len(key), self.page_bytes - 1), TOKEN_BYTES):
            leaf = parent.children.get(key[:length])
            copy = leaf.copies.get(cache.worker) if leaf else None
            if copy and copy.evictable:
                cache.freed.extend(self.unlink(copy, cache))

    def is_redundant(self, tail: Copy, cache: WorkerCache) -> bool:
        """Whether the same worker holds a page that begins with all the tokens of this partial page."""
        parent = tail.node.parent
        assert parent is not None, "a tail has a parent"
        return parent.copies[cache.worker].holds_more(tail.node.key)

    def nodes_of(self, worker: str) -> Iterator[Node]:
        """Every node the worker has a copy of, roots included, parents before their children."""
        stack = [root for root in self.roots.values() if worker in root.copies]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children[key] for key in node.copies[worker].keys)

    def copies_of(self, worker: str) -> Iterator[Copy]:
        return (node.copies[worker] for node in self.nodes_of(worker))

    def drop(self, cache: WorkerCache) -> None:
        """Remove every copy of a worker, walking only what it holds."""
        worker = cache.worker
        for node in reversed(list(self.nodes_of(worker))):
            del node.copies[worker]
            if node.copies:
                continue
            if node.parent is None:
                del self.roots[node.key]
            else:
                del node.parent.children[node.key]
                node.parent = None
                self.num_nodes -= 1
        self.version += 1
