-- What every script stands on: its batch, the store's time, and how what is stored is read.
--
-- A script is made of parts (`_scripts.py`): the constants (FIELDS, KIND, SCHEMA and the limits), this
-- one, `records.lua`, those of `life.lua` (the rules of the module `machine`), `missed.lua` and
-- `holders.lua` that it needs, `answers.lua`, and what it does itself. ARGV[1] is the batch as JSON. Every number is whole milliseconds, but for NOW_US and fences:
-- these have 16 digits, of which `..`, `tostring` and cjson would keep 14 (see `text`).
--
-- KEYS[1] is the namespace's key, KEYS[2] and so on those of the jobs, one an item of the batch.
-- In a cluster the namespace's keys are on a node of their own, and so are those of each job: then
-- (`batch.apart`) KEYS are those of one job alone, once an item, and NS is nil. Whatever a claim
-- depends on is in its job's keys. What the namespace keeps (instances, lists of jobs and runs,
-- how often there were news) is for people, for wake-ups, and for who is alive.

local batch = cjson.decode(ARGV[1])
local NS = not batch.apart and KEYS[1] or nil
local BEFORE = NS and 1 or 0 -- the keys that stand before the items'

-- The store's time (S1). A simulated one comes with the batch, from tests alone.
local function time_us()
  if batch.now_us then
    return batch.now_us
  end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local NOW_US = time_us()
local NOW = math.floor(NOW_US / 1000)

local function text(value)
  if type(value) == 'number' then
    return string.format('%.0f', value)
  end
  return value
end

-- What the store holds is input: a record that nobody of ours wrote spoils its own item alone.
local function broken(key, why)
  error({ broken = key .. ': ' .. why })
end

local function number(key, value, otherwise)
  if not value or value == '' then
    return otherwise
  end
  return tonumber(value) or broken(key, 'not a number where one belongs')
end

-- The answer to a reading command; only a key of another kind is the record's own fault.
local function read(key, ...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'WRONGTYPE', 1, true) then
      broken(key, reply.err)
    end
    error(reply.err, 0)
  end
  return reply
end

-- What `act(...)` returns, or what is broken.
local function unless_broken(act, ...)
  local fine, answer = pcall(act, ...)
  if fine then
    return answer
  end
  if type(answer) ~= 'table' or not answer.broken then
    error(answer, 0)
  end
  return nil, answer.broken
end

-- The layout ------------------------------------------------------------------------------

local meta = {}
if NS then
  -- The namespace, made when it is first asked for.
  meta = redis.call('HMGET', NS, 'schema', 'store_id')
  if not meta[1] then
    redis.call('HSET', NS, 'schema', SCHEMA, 'store_id', batch.store_id)
    meta = { SCHEMA, batch.store_id }
  end
else
  meta[1] = redis.call('HGET', KEYS[1], 'schema') or SCHEMA
  -- While a cluster moves a slot, key by key, a node refuses what asks for a key that is not there
  -- (any more). Here it does so before the first write, so that nothing is done by half.
  redis.call('EXISTS', KEYS[1] .. ':nothing')
end
if meta[1] == '2' then
  -- All that layout 2 has means the same in this one, which has more kinds of runs, and more keys.
  -- Who knows only layout 2 is refused from now on.
  redis.call('HSET', KEYS[1], 'schema', SCHEMA)
  redis.call('HDEL', KEYS[1], 'freed')
elseif meta[1] ~= SCHEMA then
  return redis.error_reply('ANARCHONSCHEMA ' .. meta[1])
end
