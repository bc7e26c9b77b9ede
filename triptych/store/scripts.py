"""Lua scripts over embeddings, each one atomic step in the server, and the server's clock that they read."""

from __future__ import annotations

#: Of a reply of pcall: an error other than that the key holds no string is the script's, and that one leaves
#: no bytes. Nobody but another program, or a slip, makes such keys; the item is encoded again.
_OTHER_KIND = """
if type(%(reply)s) == 'table' then
  if not string.find(%(reply)s.err, 'WRONGTYPE', 1, true) then return %(reply)s end
  %(reply)s = ''
  other_kind = true
end
"""

#: The head of a value and a new TTL for it and its parts, in one step. The TTL in it is not yet verified:
#: at most a week.
LOOK_UP = (
    """
local other_kind = false
local head = redis.pcall('GETRANGE', KEYS[1], 0, 4095)
"""
    + _OTHER_KIND % {"reply": "head"}
    + """
if #head < 48 then return head end
local a, b, c, d = string.byte(head, 9, 12)
local ttl = math.min(a + 256 * (b + 256 * (c + 256 * d)), 604800)
redis.call('EXPIRE', KEYS[1], ttl)
local e, f, g, h = string.byte(head, 13, 16)
local parts = math.min(e + 256 * (f + 256 * (g + 256 * h)), 1024)
if parts > 0 then
  local id = {}
  for i = 17, 24 do id[#id + 1] = string.format('%02x', string.byte(head, i)) end
  for i = 0, parts - 1 do
    local part = KEYS[1] .. ':' .. table.concat(id) .. ':' .. i
    if redis.call('EXPIRE', part, ttl + tonumber(ARGV[1])) == 0 then return '' end
  end
end
local size = string.byte(head, 7) + 256 * string.byte(head, 8)
return string.sub(head, 1, 48 + size)
"""
)

#: Deletes a value whose first 4 KiB have this SHA-1: that of no bytes names a key of another kind.
DROP_DAMAGED = (
    """
local other_kind = false
local head = redis.pcall('GETRANGE', KEYS[1], 0, 4095)
"""
    + _OTHER_KIND % {"reply": "head"}
    + """
if (#head == 0 and not other_kind) or redis.sha1hex(head) ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
)

#: Deletes the parts of a write whose header is not the stored one: another writer's header came first. The
#: write's own header can be there although its SET said no, where the reply to an earlier try was lost.
DELETE_PARTS = (
    """
local other_kind = false
local id = redis.pcall('GETRANGE', KEYS[1], 16, 23)
"""
    + _OTHER_KIND % {"reply": "id"}
    + """
local hex = {}
for i = 1, #id do hex[#hex + 1] = string.format('%02x', string.byte(id, i)) end
if table.concat(hex) == ARGV[1] then return 0 end
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""
)

#: The store's epoch, made if there is none, and the server's time.
EPOCH = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local time = redis.call('TIME')
return {redis.call('GET', KEYS[1]), time[1], time[2]}
"""


#: The first lines of every script with deadlines: `now`, in milliseconds of the server's clock. The clocks
#: of workers differ, so deadlines are compared in the server.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

#: More than clocks drift between two replies, less than the shortest term in the store.
SLACK_SECONDS = 5.0


class ServerClock:
    """A counter of jumps of the server's clock against this process's monotonic clock. Pure.

    When the server's clock jumps ahead, leases and registrations expire at once although their owners live:
    the clock was set, or the machine was suspended or migrated.
    """

    def __init__(self, slack: float = SLACK_SECONDS) -> None:
        self.jumps = 0
        self._slack = slack
        #: Bounds of the server's time less ours.
        self._bounds: tuple[float, float] | None = None

    def answered(self, server: float, sent: float, received: float) -> None:
        """Adds the `server`'s time from a reply; its command was `sent` and answered (`received`) then."""
        low, high = server - received, server - sent
        known, self._bounds = self._bounds, (low, high)
        if known is not None and (low > known[1] + self._slack or high < known[0] - self._slack):
            self.jumps += 1
