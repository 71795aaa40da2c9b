-- What is kept of a job beside its runs: what instances hold (S28), and for how long all of it (S30).

-- Notes on each definition that the instance held it until `at`, and drops its hold.
local function let_go_of(key, incarnation, held, at)
  for _, hold in ipairs(held) do
    local field = hold[1] .. ':held_at'
    local before = read(key .. ':definitions', 'HGET', key .. ':definitions', field)
    if before and number(key, before) < at then
      redis.call('HSET', key .. ':definitions', field, text(at))
    end
  end
  redis.call('HDEL', key .. ':holds', incarnation)
end

-- Registration (`machine.judge_registration`) ---------------------------------------------------

-- When the schedule's present stretch began; a new one begins where nobody has it any more.
local function since_of(key, schedule_id, in_use)
  local since = number(key, read(key, 'HGET', key, 'since:' .. schedule_id), nil)
  if not (since and in_use[schedule_id]) then
    since = NOW
    redis.call('HSET', key, 'since:' .. schedule_id, text(NOW))
  end
  return since
end

local function judge(key, job, wanted, live)
  local known, in_use = { [job.definition_id] = true }, { [job.schedule_id] = true }
  for _, hold in ipairs(live) do
    known[hold[1]], in_use[hold[2]] = true, true
  end
  if not known[wanted.definition_id] then
    job.definition_id, job.definition_at = wanted.definition_id, NOW
    job.schedule_id = wanted.schedule_id
    redis.call('HSET', key, 'definition_id', wanted.definition_id, 'schedule_id',
      wanted.schedule_id, 'definition_at', text(NOW))
  end
  redis.call('HSET', key .. ':definitions', wanted.definition_id, wanted.kept,
    wanted.definition_id .. ':held_at', text(NOW))
  if wanted.schedule_id ~= '' then
    return { since = text(since_of(key, wanted.schedule_id, in_use)) }
  end
  return {}
end

local function differ(live)
  for _, hold in ipairs(live) do
    if hold[1] ~= live[1][1] then
      return true
    end
  end
  return false
end

-- All definitions of one job that the instance holds from now on; `batch.live` as it was before.
function acts.register(item, key)
  tend(key)
  local ours = batch.incarnation
  local job, holds = load_job(key), load_holds(key)
  local live, own, answers = live_of(holds), {}, {}
  mark(key)
  for i, wanted in ipairs(item.wanted) do
    answers[i] = judge(key, job, wanted, live)
    own[i] = { wanted.definition_id, wanted.schedule_id }
  end
  if cjson.encode(own) ~= cjson.encode(holds[ours] or {}) then
    let_go_of(key, ours, holds[ours] or {}, NOW)
    redis.call('HSET', key .. ':holds', ours, cjson.encode(own))
  end
  batch.live[ours], holds[ours] = true, own
  return {
    definition_id = job.definition_id, definition_at = text(job.definition_at),
    wanted = answers, differ = differ(live_of(holds)),
  }
end

-- `batch.incarnation` does not hold the job any more, since `batch.at` or now.
function acts.let_go(_, key)
  local held = load_holds(key)[batch.incarnation]
  if held then
    let_go_of(key, batch.incarnation, held, batch.at or NOW)
  end
  return {}
end

-- Pruning ---------------------------------------------------------------------------------------

local function definitions_of(key)
  local all = read(key .. ':definitions', 'HGETALL', key .. ':definitions')
  local fields, kept = {}, {}
  for i = 1, #all, 2 do
    fields[all[i]] = all[i + 1]
  end
  for id, value in pairs(fields) do
    if not string.find(id, ':', 1, true) then
      local fine, definition = pcall(cjson.decode, value)
      if not fine or type(definition) ~= 'table' or type(definition.schedule_id) ~= 'string' then
        broken(key .. ':definitions', 'definition ' .. id)
      end
      kept[#kept + 1] = {
        id = id, schedule_id = definition.schedule_id,
        held_at = number(key, fields[id .. ':held_at'], 0),
      }
    end
  end
  return kept
end

local function drop_schedules(key, used)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local schedule_id = string.match(field, '^since:(.*)$')
    if schedule_id and not used[schedule_id] then
      redis.call('HDEL', key, field)
    end
  end
end

-- Whether it was registered after it was looked which instances there are: its instance may have come since.
local function is_newer(key, held)
  for _, hold in ipairs(held) do
    local held_at = read(key .. ':definitions', 'HGET', key .. ':definitions', hold[1] .. ':held_at')
    if number(key, held_at, 0) >= batch.looked_at then
      return true
    end
  end
  return false
end

-- The ids of the definitions that an instance holds. Holds of instances that are none go.
local function held_ids(key)
  local ids = {}
  for incarnation, held in pairs(load_holds(key)) do
    if batch.instances[incarnation] or is_newer(key, held) then
      for _, hold in ipairs(held) do
        ids[hold[1]] = true
      end
    else
      let_go_of(key, incarnation, held, NOW)
    end
  end
  return ids
end

-- Drops the definitions that nobody has held for the history (`machine.judge_definitions`).
-- Whether even the last may go, in which case none is dropped.
local function drop_definitions(key)
  local job, held = load_job(key), held_ids(key)
  local stay, gone, used, heir = {}, {}, {}, nil
  for _, each in ipairs(definitions_of(key)) do
    if not held[each.id] and each.held_at < NOW - batch.history_ms then
      gone[#gone + 1] = each
    else
      stay[each.id], used[each.schedule_id] = true, true
      local later = heir and each.held_at == heir.held_at and each.id > heir.id
      if not heir or each.held_at > heir.held_at or later then
        heir = each
      end
    end
  end
  if not heir then
    return true
  end
  if not stay[job.definition_id] then
    redis.call('HSET', key, 'definition_id', heir.id, 'schedule_id', heir.schedule_id)
  end
  for _, each in ipairs(gone) do
    redis.call('HDEL', key .. ':definitions', each.id, each.id .. ':held_at')
  end
  drop_schedules(key, used)
  return false
end

-- The job's runs that may go, oldest first (`claim_only.prunable`, where `batch.instances` are known),
-- and the newest of them that is too old for anybody to claim (nil: none).
local function prunable(key, room)
  local runs, oldest, beyond = key .. ':runs', NOW - batch.history_ms, -1
  local too_many = read(runs, 'ZREVRANGE', runs, batch.history_max, batch.history_max)
  if too_many[1] then
    beyond = tonumber(too_many[1])
  end
  local slots, floor, reach = {}, nil, text(math.max(beyond, oldest - 1))
  local most = room + LOOKED_AT
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', runs, '-inf', reach, 'LIMIT', 0, most)) do
    if #slots == room then
      break
    end
    local row = key .. ':' .. slot
    local values = read(row, 'HMGET', row, 'state', 'incarnation', 'ended_at', 'retry_at',
      'claimed_at')
    local final, at = FINAL[values[1]], tonumber(slot)
    for i = 3, 5 do
      at = math.max(at, tonumber(values[i] or '') or 0)
    end
    local may_yet_end = not final and batch.instances[values[2] or '']
    if (at < oldest and not may_yet_end) or (final and tonumber(slot) <= beyond) then
      slots[#slots + 1] = slot
      floor = tonumber(slot) < NOW - KEPT_MS and slot or floor
    end
  end
  return slots, floor
end

local function delete_runs(key, slots)
  for _, slot in ipairs(slots) do
    local row = key .. ':' .. slot
    local request_id = read(row, 'HGET', row, 'request_id')
    if request_id and request_id ~= '' then
      redis.call('HDEL', key .. ':requests', request_id)
      redis.call('HDEL', key .. ':payloads', slot)
    end
    redis.call('DEL', row)
    redis.call('ZREM', key .. ':runs', slot)
    note_news(key, slot, false)
  end
end

-- A job that nobody has any more: its floor stays, for it must never fall.
local function forget_job(key)
  redis.call('HDEL', key, 'definition_id', 'schedule_id', 'definition_at', 'paused_at', 'pause_reason')
  drop_schedules(key, {})
  redis.call('DEL', key .. ':definitions', key .. ':holds')
  forget(key)
end

-- The floor rises only to slots that are too old for any claim: of those after it that had no row
-- one may still be claimed, and of those that had one the record of the claim is there yet.
function acts.prune(_, key)
  if batch.room <= 0 then
    return { skipped = true }
  end
  local unused = drop_definitions(key)
  local slots, floor = prunable(key, batch.room)
  batch.room = batch.room - #slots
  if floor and tonumber(floor) > load_job(key).floor then
    redis.call('HSET', key, 'floor', floor)
  end
  delete_runs(key, slots)
  trim(key)
  local forgotten = unused and redis.call('EXISTS', key .. ':runs') == 0
  if forgotten then
    forget_job(key)
  end
  return { gone = #slots, forgotten = forgotten }
end

-- Tries every command that definitions and pruning need, on keys that no job has.
function acts.probe(_, key)
  local probe = key .. ':probe'
  redis.call('HSET', probe, 'a', '1')
  redis.call('HGET', probe, 'a')
  redis.call('HMGET', probe, 'a')
  redis.call('HGETALL', probe)
  redis.call('HKEYS', probe)
  redis.call('HDEL', probe, 'a')
  redis.call('EXISTS', probe)
  redis.call('DEL', probe)
  redis.call('ZADD', probe, 1, 'a')
  redis.call('ZREVRANGE', probe, 0, 0)
  redis.call('ZRANGEBYSCORE', probe, '-inf', '+inf', 'LIMIT', 0, 1)
  redis.call('ZREM', probe, 'a')
  redis.call('DEL', probe)
  trim(probe)
  forget(probe)
  return { outcome = 'fine' }
end

return reply()
