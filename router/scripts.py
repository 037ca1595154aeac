"""What the store asks of Redis: each operation is one script over one key, so it is atomic, on a cluster too.

A conversation is a hash with the fields `record`, `turn` and `stamp`, which are written together, and `offer`, which
is there until somebody takes it. A key that holds something else is treated as if it were not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


def _script(body: str) -> Script:
    text = _COMMON + body
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


_COMMON = """
local key = KEYS[1]
local function is_foreign(reply)
  return reply.err and string.find(reply.err, 'WRONGTYPE', 1, true)
end
"""

CLAIM = _script(
    """
local got = redis.pcall('HMGET', key, 'record', 'offer', 'stamp', 'turn')
if is_foreign(got) then return 'foreign' end
if not got.err and got[2] then redis.call('HDEL', key, 'offer') end
return got
"""
)
"""-> [record, offer, stamp, turn], each nil if not there, or 'foreign'."""

SAVE = _script(
    """
local turn, stamp, ttl, record, offer = unpack(ARGV)
local got = redis.pcall('HMGET', key, 'turn', 'offer')
if is_foreign(got) then
  redis.call('DEL', key)
  got = {}
elseif got.err then
  return got
end
local known = got[1]
if known and #known <= 10 and string.find(known, '^%d+$') and tonumber(known) > tonumber(turn)
    and redis.call('PTTL', key) > 0 then
  return {0, false}
end
redis.call('HSET', key, 'record', record, 'turn', turn, 'stamp', stamp)
if offer ~= '' then
  redis.call('HSET', key, 'offer', offer)
else
  redis.call('HDEL', key, 'offer')
end
redis.call('PEXPIRE', key, ttl)
if got[2] == offer then return {1, false} end
return {1, got[2] or false}
"""
)
"""turn, stamp, milliseconds, record, offer or '' -> [1 if it is there now, the offer it replaced or nil].

What has no time to live, or a turn that is no number, was not written by us and does not stay.
"""

PUT_BACK = _script(
    """
local got = redis.pcall('HMGET', key, 'stamp', 'offer')
if is_foreign(got) then return 0 end
if got.err then return got end
if got[1] ~= ARGV[1] or got[2] then return 0 end
redis.call('HSET', key, 'offer', ARGV[2])
return 1
"""
)
"""stamp, offer -> 1 if it is there now. The time to live stays what it is."""

TAKE_OFFER = _script(
    """
local got = redis.pcall('HMGET', key, 'stamp', 'offer')
if is_foreign(got) then return false end
if got.err then return got end
if got[1] ~= ARGV[1] or not got[2] then return false end
redis.call('HDEL', key, 'offer')
return got[2]
"""
)
"""stamp -> the offer, or nil."""

DROP = _script(
    """
local stamp = redis.pcall('HGET', key, 'stamp')
if type(stamp) ~= 'table' then
  if (stamp or '') ~= ARGV[1] then return 0 end
elseif not is_foreign(stamp) then
  return stamp
end
return redis.call('DEL', key)
"""
)
"""The stamp that was found, or '' -> 1 if what nobody can read is gone; a record saved meanwhile stays."""
