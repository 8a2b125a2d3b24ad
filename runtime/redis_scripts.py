"""What Redis decides by itself, each in one step that nothing comes between: scripts in its Lua.

Who holds a name and an address is decided here as in listing.py, which says why; a test holds one against the other. Four keys:

    entries    hash   name -> record (registry_record.py), kept KEEP_MS behind its last repetition: whoever takes a silent
                      process's name sends it away for good
    seen       zset   name -> when it was last repeated, in ms of Redis's own clock; expired after `ttl_ms`
    addresses  hash   gRPC address -> name
    gone       zset   "incarnation name" of who was replaced or deregistered -> when

Redis may lose all of them at any time: nodes write them again. A key of ours that holds another type was written by somebody else:
whoever writes removes it, whoever reads fails until then. Effects are what is replicated (the default since Redis 5), so the clock
may be read. Texts only; who runs them is redis_store.py.
"""

from __future__ import annotations

from typing import Final

from runtime.listing import MAX_ENTRIES, MAX_GONE, MAX_TEXT_CHARS
from runtime.registry_record import MAX_RECORD_BYTES

KEEP_MS: Final = 3_600_000  # also until Redis forgets a cluster of which nothing is left
RECENT_MS: Final = 10_000  # for so long routers are told who has gone; they look every quarter of a second
MAX_NAME_BYTES: Final = 4 * MAX_TEXT_CHARS
_MAX_FORGOTTEN: Final = 64  # per call, so that none takes long

TAKEN: Final = b"taken"
GONE: Final = b"gone"
OLDER: Final = b"older"
FULL: Final = b"full"

_OPENING: Final = """
local entries, seen, addresses, gone = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ttl_ms = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function text(number) return string.format('%.0f', number) end
"""

_HOLDERS: Final = f"""
local function drop_what_is_not_ours(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
drop_what_is_not_ours(entries, 'hash')
drop_what_is_not_ours(seen, 'zset')
drop_what_is_not_ours(addresses, 'hash')
drop_what_is_not_ours(gone, 'zset')

local function find(name)
  local size = redis.call('HSTRLEN', entries, name)
  if size == 0 or size > {MAX_RECORD_BYTES} then return nil end
  local record = redis.call('HGET', entries, name)
  local incarnation, started_ms, address = string.match(record, '^(%x+) (%d+) (%S+)\\n')
  if not incarnation then return nil end
  local age_ms = now - (tonumber(redis.call('ZSCORE', seen, name)) or 0)
  return {{name = name, incarnation = incarnation, started_ms = tonumber(started_ms), address = address,
          is_listed = age_ms >= 0 and age_ms < ttl_ms}}
end

local function forget(name)
  local known = find(name)
  if known and redis.call('HGET', addresses, known.address) == name then
    redis.call('HDEL', addresses, known.address)
  end
  redis.call('HDEL', entries, name)
  redis.call('ZREM', seen, name)
end

local function send_away(name, incarnation)
  forget(name)
  redis.call('ZADD', gone, text(now), incarnation .. ' ' .. name)
end

local function tidy_up()
  for _, range in ipairs({{{{'-inf', text(now - {KEEP_MS})}}, {{text(now + 60000), '+inf'}}}}) do
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', seen, range[1], range[2], 'LIMIT', 0, {_MAX_FORGOTTEN})) do
      forget(name)
    end
    redis.call('ZREMRANGEBYSCORE', gone, range[1], range[2])
  end
  redis.call('ZREMRANGEBYRANK', gone, 0, -{MAX_GONE + 1})
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, {KEEP_MS}) end
end
"""

# ARGV: ttl_ms, name, incarnation, started_ms, address, record. Answers one of TAKEN, GONE, OLDER, FULL.
REGISTER: Final = f"""{_OPENING}{_HOLDERS}
local name, incarnation, started_ms, address, record = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
if redis.call('ZSCORE', gone, incarnation .. ' ' .. name) then return '{GONE.decode()}' end
local known = find(name)
local num_listed = redis.call('ZCOUNT', seen, '(' .. text(now - ttl_ms), text(now))
if not (known and known.is_listed) and num_listed >= {MAX_ENTRIES} then return '{FULL.decode()}' end

local others = {{}}
if known and known.is_listed and known.incarnation ~= incarnation then table.insert(others, known) end
local neighbour = redis.call('HGET', addresses, address)
if neighbour and neighbour ~= name then
  local holder = find(neighbour)
  if holder and holder.is_listed and holder.address == address then table.insert(others, holder) end
end
for _, other in ipairs(others) do
  if started_ms > 0 and started_ms < other.started_ms then return '{OLDER.decode()}' end
end
for _, other in ipairs(others) do send_away(other.name, other.incarnation) end
if known and known.incarnation ~= incarnation then send_away(name, known.incarnation) else forget(name) end

redis.call('HSET', entries, name, record)
redis.call('ZADD', seen, text(now), name)
redis.call('HSET', addresses, address, name)
tidy_up()
return '{TAKEN.decode()}'
"""

# ARGV: ttl_ms, name, incarnation. It is gone even if nobody knows it: its last registration may still be on its way.
DEREGISTER: Final = f"""{_OPENING}{_HOLDERS}
local name, incarnation = ARGV[2], ARGV[3]
local known = find(name)
if known and known.incarnation == incarnation then forget(name) end
redis.call('ZADD', gone, text(now), incarnation .. ' ' .. name)
tidy_up()
return '{GONE.decode()}'
"""

# ARGV: ttl_ms. KEYS[5] is written first: a Redis that takes no writes (full, a replica, its disk) hears from no node either,
# and this fails, where it would otherwise look as if all nodes were silent.
# Answers {{now_ms, number of values not fit to send, {{name, seen_ms, record, …}}, {{"incarnation name", …}}}}.
READ: Final = f"""{_OPENING}
redis.call('SET', KEYS[5], text(now), 'PX', 60000)
local rows, unfit = {{}}, 0
local found = redis.call('ZRANGEBYSCORE', seen, '(' .. text(now - ttl_ms), text(now), 'WITHSCORES', 'LIMIT', 0, {MAX_ENTRIES})
for i = 1, #found, 2 do
  local name, size = found[i], redis.call('HSTRLEN', entries, found[i])
  if #name > {MAX_NAME_BYTES} or size == 0 or size > {MAX_RECORD_BYTES} then
    unfit = unfit + 1
  else
    table.insert(rows, name)
    table.insert(rows, found[i + 1])
    table.insert(rows, redis.call('HGET', entries, name))
  end
end
local left = {{}}
for _, who in ipairs(redis.call('ZRANGEBYSCORE', gone, text(now - {RECENT_MS}), text(now), 'LIMIT', 0, {MAX_GONE})) do
  if #who <= {MAX_NAME_BYTES + 17} then table.insert(left, who) else unfit = unfit + 1 end
end
return {{text(now), unfit, rows, left}}
"""
